"""Part "oom": `harness run` of recipes that cannot fit: exit status, message, profile, snapshot; and
whether the simulation said so before.
"""

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_programme.tasks import Context, Piece, Result

RUNS: dict[str, tuple[str, ...]] = {
    "activations": (
        "llama-3.1-8b-full-bf16",
        "gradient_checkpointing=false",
        "micro_batch_size=64",
        "seq_len=8192",
    ),
    "weights": ("llama-3.1-70b-qlora", "quantization=none", "double_quant=false", "precision=fp32"),
}
"""Recipe and overrides: the first fills a GPU of any size in forward, the second in setup."""
TINY_RUN = ("smoke", "data=synthetic", "attention=eager", "micro_batch_size=8", "seq_len=2048", "steps=1")
TINY_ROOM_BYTES = 2**29
"""What a process without a GPU may map beyond the libraries, so that it runs out as well."""


def pieces(context: Context) -> list[Piece]:
    """Each recipe run, and simulated."""
    made = []
    for name, run in RUNS.items():
        gpu_only = None if name == "activations" else "a host has room for any weights, it swaps"
        arguments = {"run": TINY_RUN if context.tiny else run}
        for source, piece in (("measured", run_out), ("simulated", predict)):
            made.append(Piece(f"{name}.{source}", piece, arguments, ("peft",), gpu_only=gpu_only))
    return made


def run_out(context: Context, run: tuple[str, ...]) -> Result:
    """`harness run` in this process: how it ended, and what it left."""
    from harness.cli.app import main
    from harness.snapshot.safe_read import read_snapshot
    from harness.step_profile.step_profile import StepProfile

    said, status = io.StringIO(), None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        sys.argv = ["harness", "run", *run, "--out", str(out), "--device", context.device]
        room = _little_room() if context.device == "cpu" else nullcontext()
        with room, redirect_stdout(io.StringIO()), redirect_stderr(said):
            try:
                main()
            except SystemExit as ended:
                status = ended.code
        left = sorted(path.name for path in out.iterdir()) if out.exists() else []
        result: Result = {
            "run": list(run),
            "exit_status": status,
            "message": said.getvalue().replace(folder, "."),
            "files": left,
        }
        if "profile.json" in left:
            profile = StepProfile.read(out / "profile.json")
            document: dict[str, Any] = profile.model_dump(mode="json")
            result |= {"oom": document["oom"], "complete": profile.complete, "memory": document["memory"]}
        if "snapshot.pickle" in left:
            snapshot = read_snapshot(out / "snapshot.pickle")
            result["snapshot_entries"] = sum(len(trace) for trace in snapshot["device_traces"])
    return result


def predict(context: Context, run: tuple[str, ...]) -> Result:
    """What the simulation says of the same recipe on this device (without a GPU: on one of 1 GiB)."""
    from benchmarks.predict import hardware_here, settings_here
    from harness.recipe.file import load_recipe
    from harness.simulate.simulated_run import simulate

    hardware = hardware_here(context)
    if context.device == "cpu":
        memory = hardware.datasheet.memory_bytes._replace(
            value=2**30, source="a GPU that the run does not fit"
        )
        hardware = replace(hardware, datasheet=hardware.datasheet._replace(memory_bytes=memory))
    recipe = load_recipe(run[0], run[1:])[1]
    profile, _ = simulate(recipe, hardware, settings_here())
    document = profile.model_dump(mode="json")
    return {
        "run": list(run),
        "hardware": hardware.name,
        "oom": document["oom"],
        "complete": profile.complete,
        "memory": document["memory"],
    }


@contextmanager
def _little_room() -> Iterator[None]:
    """Let this process map no more than TINY_ROOM_BYTES beyond what the libraries have."""
    import resource

    import harness.measure.measured_run
    import harness.training.model  # noqa: F401

    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes + TINY_ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
