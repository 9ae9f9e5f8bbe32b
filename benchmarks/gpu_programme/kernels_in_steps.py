"""Part "profile": every kernel of one step of full-size recipes, by torch.profiler.

The traces stand beside the part's file, DIR/profile/<recipe>.json.gz: `harness calibrate --trace` reads them,
and `python -m benchmarks.time.on_hardware` holds each operator's kernels against their estimate.
"""

import statistics
import time

from benchmarks.gpu_programme.recipes import PROFILED, Spec
from benchmarks.gpu_programme.tasks import LIGER_IS_TRITON, Context, Piece, Result, modules_of

WARMUP_STEPS, TIMED_STEPS = 3, 4


def pieces(context: Context) -> list[Piece]:
    """One for each recipe of PROFILED."""
    made = []
    for spec in PROFILED:
        recipe = spec.recipe(tiny=context.tiny)
        fused = LIGER_IS_TRITON if recipe.loss == "fused_linear" else None
        made.append(Piece(spec.name, profiled, {"spec": spec}, modules_of(recipe), gpu_only=fused))
    return made


def profiled(context: Context, spec: Spec) -> Result:
    """Steps on the clock, each waited for; then one under the profiler, its trace written."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from harness.measure.observer import Unobserved
    from harness.training.loop import Kind, run_steps, set_up

    device = torch.device(context.device)
    training, batches = set_up(spec.recipe(tiny=context.tiny), device, Unobserved())

    def step_s() -> float:
        kinds: list[Kind] = ["timed"]
        began = time.perf_counter()
        list(run_steps(training, batches, device, kinds, Unobserved()))
        if context.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(WARMUP_STEPS):
        step_s()
    seconds = [step_s() for _ in range(TIMED_STEPS)]
    on_gpu = [ProfilerActivity.CUDA] if context.device == "cuda" else []
    with profile(activities=[ProfilerActivity.CPU, *on_gpu], record_shapes=True) as profiler:
        profiled_s = step_s()
    path = context.out / "profile" / f"{spec.name}.json.gz"
    path.parent.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(path))
    kernels = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return {
        "step_s": statistics.median(seconds),
        "profiled_step_s": profiled_s,
        "kernels": len(kernels),
        "trace_bytes": path.stat().st_size,
    }
