"""Part "overhead": the harness's step over a bare loop's, as it is timed and while memory is recorded."""

from typing import Any

from benchmarks.gpu_programme.recipes import Spec
from benchmarks.gpu_programme.tasks import Context, Piece, Result, modules_of

SIZES: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 1024}
RECIPES = (
    Spec("1b-bf16", "llama-3.2-1b-bf16", SIZES),
    Spec("8b-lora", "llama-3.1-8b-lora", SIZES),
    # short sequences: the host launches kernels that end at once, and every line of Python shows
    Spec("1b-lora-host-bound", "llama-3.2-1b-bf16", {"adapter": "lora", "seq_len": 16}),
)
ROUNDS = 30
BARS = {"off": 1.01, "on": 1.05}


def pieces(context: Context) -> list[Piece]:
    """Each recipe, with recording off (two CUDA events a phase) and on (the memory history)."""
    return [
        Piece(
            f"{spec.name}.recording-{recording}",
            compare,
            {"spec": spec, "recording": recording},
            modules_of(spec.recipe(tiny=context.tiny)),
        )
        for spec in RECIPES
        for recording in ("off", "on")
    ]


def compare(context: Context, spec: Spec, recording: str) -> Result:
    """Medians of the two loops' steps, taken in turns, and their ratio."""
    import torch

    from benchmarks.speed import overhead

    recipe, device = spec.recipe(tiny=context.tiny), torch.device(context.device)
    rounds = 4 if context.tiny else ROUNDS
    if recording == "off":
        found = overhead.compare(recipe, device, rounds)
    else:
        found = overhead.compare(
            recipe, device, rounds, _recorded_loop, lambda name: _record(device, name == "harness")
        )
    return {"recipe": spec.name, "recording": recording, "bar": BARS[recording], **found}


def _recorded_loop(recipe: Any, device: Any, rounds: int) -> Any:
    """The harness's steps in which every allocation is written down."""
    from benchmarks.speed.overhead import WARMUP_ROUNDS
    from harness.measure.cpu import CpuObserver
    from harness.measure.cuda import CudaObserver
    from harness.training.loop import Kind, run_steps, set_up

    observer = CudaObserver(device, with_history=True) if device.type == "cuda" else CpuObserver()
    training, batches = set_up(recipe, device, observer)
    observer.trained(training)
    kinds: list[Kind] = ["recorded"] * (WARMUP_ROUNDS + rounds)
    for step in run_steps(training, batches, device, kinds, observer):
        observer.end_step()
        yield step.loss


def _record(device: Any, on: bool) -> None:
    """Switch torch's memory history, as CudaObserver does: the bare loop runs without."""
    if device.type != "cuda":
        return
    import torch

    from harness.measure.device_memory import MAX_ENTRIES

    if on:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python", context="all")
    else:
        torch.cuda.memory._record_memory_history(enabled=None)
