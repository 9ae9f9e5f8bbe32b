"""Rates of copies and of the host's optimizer, the time of a kernel, and the host's speed."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu_programme.tasks import Context, Result

REPEATS = 20
HIDDEN = 4096
"""Of Llama-3.1-8B, whose weights the optimizer's are as large as."""
OPERATORS = 500
"""How many are launched to see how fast a process is: fewer than a device's queue holds."""
TURNS = 500_000


def host_link(context: Context) -> Result:
    """Copies between the host and the device, both directions, from pinned and from pageable memory."""
    import torch

    size = 2**16 if context.tiny else 2**30
    on_device = torch.empty(size, dtype=torch.uint8, device=context.device)
    rows = []
    for kind in ("pinned", "pageable"):
        on_host = torch.zeros(size, dtype=torch.uint8)  # zeros: every page is there
        if kind == "pinned" and context.device == "cuda":
            on_host = on_host.pin_memory()
        for direction, target, source in (("to device", on_device, on_host), ("to host", on_host, on_device)):
            seconds = median_seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True), context)
            rows.append({"memory": kind, "direction": direction, "bytes": size, "s": seconds})
    return {"rows": rows}


def host_optimizer(context: Context) -> Result:
    """AdamW's step over weights in host memory, as `offload` takes it. Bytes are those that napkin counts
    for it, since napkin divides by this rate.
    """
    import torch

    from harness.napkin.optimizer import OptimizerMemory
    from harness.napkin.weights import Weight
    from harness.recipe.recipe import Recipe

    side, count = (64, 2) if context.tiny else (HIDDEN, 8)
    rows = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        recipe = Recipe(model="any", offload=("optimizer",))
        weights = [torch.zeros(side, side, dtype=dtype, requires_grad=True) for _ in range(count)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW(
            weights, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, foreach=True
        )
        kind = Weight("", side, side, name, side * side * dtype.itemsize, trained=True, count=count)
        moved = OptimizerMemory(recipe, [kind]).update.bytes_moved
        rows.append({"dtype": name, "bytes": moved, "s": _median_on_clock(optimizer.step, repeats=5)})
    return {"rows": rows, "threads": torch.get_num_threads()}


def median_seconds(kernel: Callable[[], Any], context: Context) -> float:
    """Median time of one call: between CUDA events, or on the clock where there is no GPU."""
    if context.device == "cpu":
        return _median_on_clock(kernel, repeats=3)
    import torch

    for _ in range(3):
        kernel()
    pairs = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        kernel()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs)


def _median_on_clock(kernel: Callable[[], Any], repeats: int) -> float:
    for _ in range(3):
        kernel()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        kernel()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def random(context: Context, shape: Sequence[int], dtype: Any) -> Any:
    # Not zeros: multiplying those takes less power, and so less time.
    import torch

    return torch.randn(shape, dtype=dtype, device=context.device)


def host_speed(context: Context) -> Result:
    """Seconds of one operator on one number, until it is launched, and of a turn of a loop in Python."""
    import torch

    small = torch.zeros(1, device=context.device)
    for _ in range(2):  # the first time loads the kernel
        began = time.perf_counter()
        for _ in range(OPERATORS):
            small.add_(1)
        launched = time.perf_counter()
        if context.device == "cuda":
            torch.cuda.synchronize()
    turned = time.perf_counter()
    total = 0
    for turn in range(TURNS):
        total += turn
    return {
        "operator_s": (launched - began) / OPERATORS,
        "python_s": (time.perf_counter() - turned) / TURNS,
    }
