"""Times of kernels and copies, for the part "calibrate" (gpu_calibrate.py).

FLOPs are counted as harness.observe.flops does (2 a multiply-add, attention without its causal half left out)
and bytes as each input read once and each output written once.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu_programme.tasks import Context, Result

REPEATS = 20
HIDDEN, MLP, KEY_VALUE, VOCABULARY = 4096, 14336, 1024, 128256
"""Of Llama-3.1-8B, whose layers the shapes are taken from."""
BLOCK = ((HIDDEN, HIDDEN), (HIDDEN, KEY_VALUE), (HIDDEN, MLP), (MLP, HIDDEN))
TOKENS = (512, 2048, 8192)
ATTENTION = ((4, 1024), (1, 4096), (1, 16384))
"""(batch, sequence length), 32 heads of 128."""


def matmul(context: Context) -> Result:
    """Products of a block's shapes: forward, and backward's two (for the input, for the weight)."""
    import torch

    rows = []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        for shape_class, m, k, n in _matmul_shapes(context.tiny):
            left, right = random(context, (m, k), dtype), random(context, (k, n), dtype)
            if shape_class == "block weight gradient":
                left = random(context, (k, m), dtype).t()
            if shape_class == "block input gradient":
                right = random(context, (n, k), dtype).t()
            seconds = median_seconds(lambda a=left, b=right: a @ b, context)
            rows.append(
                {
                    "dtype": name,
                    "class": shape_class,
                    "shape": [m, k, n],
                    "flops": 2 * m * k * n,
                    "s": seconds,
                }
            )
    return {"rows": rows}


def attention(context: Context) -> Result:
    """Causal attention, forward and backward, by the kernel that torch chooses."""
    shapes = [(1, 2, 32, 16)] if context.tiny else [(batch, 32, length, 128) for batch, length in ATTENTION]
    return {"rows": [row for shape in shapes for row in _attention_rows(context, shape)]}


def _attention_rows(context: Context, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from harness.observe.flops import FlopCount

    q, k, v = (random(context, shape, torch.bfloat16).requires_grad_() for _ in range(3))
    count = FlopCount()

    def forward() -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    with count.phase("forward"):
        out = forward()
    gradient = torch.ones_like(out)
    with count.phase("backward"):
        backward()
    about = {"shape": list(shape), "kernels": sorted(count.attention)}
    return [
        {"phase": kernel.__name__, **about, "flops": count.flops[kernel.__name__], "s": seconds}
        for kernel in (forward, backward)
        if (seconds := median_seconds(kernel, context))
    ]


def memory(context: Context) -> Result:
    """Elementwise kernels on tensors much larger than any cache."""
    import torch

    count = 2**16 if context.tiny else 2**29
    a, b = (random(context, (count,), torch.bfloat16) for _ in range(2))
    wide = random(context, (count // 2,), torch.float32)
    kernels: dict[str, tuple[Callable[[], Any], int]] = {
        "copy bf16": (lambda: b.copy_(a), 4 * count),
        "add bf16": (lambda: a + b, 6 * count),
        "silu bf16": (lambda: torch.nn.functional.silu(a), 4 * count),
        "bf16 to fp32": (lambda: a.float(), 6 * count),
        "multiply fp32 in place": (lambda: wide.mul_(1.0001), 4 * count),
    }
    return {
        "rows": [
            {"kernel": name, "bytes": moved, "s": median_seconds(kernel, context)}
            for name, (kernel, moved) in kernels.items()
        ]
    }


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


def _matmul_shapes(tiny: bool) -> list[tuple[str, int, int, int]]:
    """(class, m, k, n): an (m, k) by a (k, n) matrix."""
    if tiny:
        classes = ("block forward", "block input gradient", "block weight gradient")
        return [(shape_class, 32, 16, 48) for shape_class in classes]
    shapes = []
    for tokens in TOKENS:
        for k, n in BLOCK:
            shapes.append(("block forward", tokens, k, n))
            shapes.append(("block input gradient", tokens, n, k))
            shapes.append(("block weight gradient", k, tokens, n))
        shapes.append(("adapter", tokens, HIDDEN, 16))
        shapes.append(("adapter", tokens, 16, HIDDEN))
    return [*shapes, ("head", 2048, HIDDEN, VOCABULARY), ("square", 8192, 8192, 8192)]


def random(context: Context, shape: Sequence[int], dtype: Any) -> Any:
    # Not zeros: multiplying those takes less power, and so less time.
    import torch

    return torch.randn(shape, dtype=dtype, device=context.device)
