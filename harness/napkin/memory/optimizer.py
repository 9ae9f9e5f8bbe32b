"""What an optimizer keeps, what its step needs for a moment, and what it moves. No torch.

Rules: torch/optim/adamw.py (through adam.py), sgd.py, _adafactor.py, and bitsandbytes/optim/optimizer.py
(0.50): 8-bit state from 4096 elements, paged state from 100,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.hardware import Work
from harness.napkin.dtypes import SIZES
from harness.napkin.model.weights import Weight
from harness.recipe import Recipe

MIN_8BIT_ELEMENTS = 4096
MIN_PAGED_ELEMENTS = 100_000
BLOCK_8BIT = 256
"""Elements of 8-bit state that share one fp32 scale."""
TABLE_BYTES = 256 * 4
"""One dynamic quantization table."""
STATES = {
    "adamw": 2,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "paged_adamw": 2,
    "adafactor": 0,
    "sgd": 0,
    "lion_8bit": 1,
}
"""Moments the size of the weight."""


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes the optimizer holds on the device and on the host, and the most its step adds."""

    title: str
    """Of the optimizer and of its implementation: for people alone."""
    implementation: str
    source: str
    state_bytes: int
    copy_bytes: int
    """Copies of the trained weights that are stepped in their place (master weights, offload)."""
    paged_bytes: int
    """State in unified memory, which the allocator does not see and the driver moves as needed."""
    step_temporary_bytes: int
    on_host: bool
    in_backward: bool
    """Each weight is stepped as its gradient arrives, and the gradient freed."""
    in_backward_share: int
    """What that step needs, for each byte of the gradient."""
    gradient_dtype: str | None
    """With a stepped copy: the dtype the gradients are cast to as they are taken."""


def stepped_dtype(recipe: Recipe, weight: Weight) -> str:
    """The dtype of what is stepped: the weight's, or fp32 for a master copy."""
    return "fp32" if recipe.master_weights else weight.dtype


def optimizer_memory(
    recipe: Recipe, trained: Sequence[Weight], *, parts_on_host: bool = False
) -> OptimizerMemory:
    """The optimizer's memory over `trained` weights, which may be the parts that live in host memory."""
    state = sum(w.count * state_bytes(recipe, w) for w in trained)
    paged = sum(w.count * paged_bytes(recipe, w) for w in trained)
    if recipe.optimizer.endswith("_8bit") and any(_is_8bit(recipe, w) for w in trained):
        state += TABLE_BYTES * STATES[recipe.optimizer]
    on_host, bitsandbytes = recipe.optimizer_on_host or parts_on_host, recipe.by_bitsandbytes
    copies = recipe.master_weights or (recipe.optimizer_on_host and not recipe.parameters_on_host)
    source = "arXiv 2110.02861; bitsandbytes/optim/optimizer.py" if bitsandbytes else "torch/optim"
    return OptimizerMemory(
        title=recipe.optimizer,
        implementation=recipe.optimizer_impl,
        source=source if bitsandbytes or state > paged else "no state",
        state_bytes=state - paged,
        copy_bytes=sum(w.count * w.elements * SIZES[stepped_dtype(recipe, w)] for w in trained)
        if copies
        else 0,
        paged_bytes=paged,
        step_temporary_bytes=step_temporary_bytes(recipe, trained),
        on_host=on_host,
        in_backward=recipe.optimizer_in_backward,
        in_backward_share=_in_step(recipe),
        gradient_dtype="fp32" if recipe.master_weights else None,
    )


def state_bytes(recipe: Recipe, weight: Weight) -> int:
    """State of one tensor, paged or not. torch's moments have the dtype of what is stepped; its step
    counters are on the host, but for fused ones (4 bytes each)."""
    elements, size = weight.elements, SIZES[stepped_dtype(recipe, weight)]
    if recipe.optimizer == "adafactor":  # arXiv 1804.04235: a row and a column factor for each matrix
        return (weight.rows + weight.stacked * weight.columns if weight.matrix else elements) * size
    moments = STATES[recipe.optimizer]
    if recipe.optimizer == "paged_adamw" or (
        recipe.optimizer.endswith("_8bit") and not _is_8bit(recipe, weight)
    ):
        return moments * 4 * elements
    if recipe.optimizer.endswith("_8bit"):
        return moments * (elements + 4 * -(-elements // BLOCK_8BIT))
    counter = 4 if recipe.optimizer == "adamw" and recipe.optimizer_impl == "fused" else 0
    return moments * size * elements + counter


def paged_bytes(recipe: Recipe, weight: Weight) -> int:
    """The part of one tensor's state that is in unified memory: moments of large tensors, not scales."""
    if not recipe.optimizer.startswith("paged") or weight.elements < MIN_PAGED_ELEMENTS:
        return 0
    return STATES[recipe.optimizer] * weight.elements * (1 if recipe.optimizer.endswith("_8bit") else 4)


def _is_8bit(recipe: Recipe, weight: Weight) -> bool:
    return recipe.optimizer.endswith("_8bit") and weight.elements >= MIN_8BIT_ELEMENTS


def step_temporary_bytes(recipe: Recipe, trained: Sequence[Weight]) -> int:
    """The most the step holds besides parameters, gradients and state.

    foreach AdamW makes the root of every second moment at once (adam.py, exp_avg_sq_sqrt), and foreach
    Adafactor every update; tensor by tensor it is one tensor's (AdamW: the root, and the root divided). Of a
    gradient that is larger than its weight, the part that steps it is copied out.
    """
    larger = [w for w in trained if w.larger_gradient]
    cut_out = max((w.elements * SIZES[stepped_dtype(recipe, w)] for w in larger), default=0)
    sizes = [(w.elements * SIZES[stepped_dtype(recipe, w)], w.count) for w in trained]
    share = _in_step(recipe)
    if recipe.optimizer_impl == "for_loop":
        temporary = share * max((size for size, _ in sizes), default=0)
    else:
        temporary = share * sum(size * count for size, count in sizes)
    of_gradient = recipe.optimizer == "sgd"  # others' temporaries come when gradients have been read
    return cut_out + temporary if of_gradient else max(cut_out, temporary)


def _in_step(recipe: Recipe) -> int:
    """Bytes that stepping a tensor needs, for each byte of it."""
    decays = recipe.optimizer == "sgd" and recipe.weight_decay > 0  # a sum of gradient and weight
    if recipe.optimizer_impl == "fused" or not (decays or recipe.optimizer in ("adamw", "adafactor")):
        return 0
    return 2 if recipe.optimizer == "adamw" and recipe.optimizer_impl == "for_loop" else 1


LAUNCHES = {"adamw": 8, "adafactor": 12}
"""Operators for one tensor, where they are not one kernel."""


def _passes(recipe: Recipe) -> dict[str, int]:
    """How often each line of an update goes over memory of the weight's size (torch/optim/adam.py, sgd.py,
    _adafactor.py): over parameter p, gradient g, moments m and v, temporary t. None of a fused kernel."""
    if recipe.optimizer_impl == "fused":
        return {}
    decay = {"p·decay": 2} if recipe.weight_decay else {}
    match recipe.optimizer:
        case "adamw":
            moments = {"m lerp g": 3, "v·β₂": 2, "v + g²": 3}
            return decay | moments | {"t = √v": 2, "t / bias": 2, "t + ε": 2, "p + m/t": 4}
        case "adafactor":
            norms = {"norm of p": 1, "norms of g's rows": 1, "and of its columns": 1, "norm of t": 1}
            root = {"t = row · column": 1, "t / mean": 2, "max(t, ε²)": 2, "1/√t": 2, "t·g": 3}
            return decay | norms | root | {"t·α": 2, "p + t": 3}
        case "sgd":
            return ({"t = g + decay·p": 3} if decay else {}) | {"p - lr·g": 3}
        case _:
            return {}


def step_work(recipe: Recipe, trained: Sequence[Weight]) -> list[Work]:
    """What one optimizer step moves, as elementwise kernels."""
    works: list[Work] = []
    passes = _passes(recipe)
    for weight in trained:
        n, p = weight.elements * weight.count, SIZES[stepped_dtype(recipe, weight)]
        # without passes one kernel reads p, g and state, and writes p and state
        state = weight.count * state_bytes(recipe, weight)
        moved = n * p * sum(passes.values()) if passes else 3 * n * p + 2 * state
        launches = weight.count * LAUNCHES.get(recipe.optimizer, 1) if passes else weight.count
        if recipe.optimizer_impl != "for_loop" and recipe.optimizer not in ("adamw_8bit", "lion_8bit"):
            launches = -(-launches // 32)  # a multi-tensor kernel takes dozens of tensors
        works.append(Work(0, moved, launches))
    extra = sum(w.elements * w.count * SIZES[stepped_dtype(recipe, w)] for w in trained)
    if recipe.max_grad_norm is not None:  # the norm reads every gradient; scaling reads and writes it
        works.append(Work(0, 3 * extra, 4))
    if recipe.scaled:  # unscaling reads and writes every gradient
        works.append(Work(0, 2 * extra, 2))
    if recipe.master_weights:  # gradients are cast to fp32, and weights back to 16 bit
        works.append(Work(0, sum(w.elements * w.count * (2 + 4 + 4 + 2) for w in trained), 2 * len(trained)))
    return works
