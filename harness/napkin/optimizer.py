"""What an optimizer keeps, what its step holds for a moment, and what it moves. No torch.

torch/optim/adam.py, sgd.py, _adafactor.py; bitsandbytes/optim/optimizer.py (0.50): 8-bit state from 4,096
elements (arXiv 2110.02861), paged state from 100,000 (arXiv 2305.14314, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.napkin.weights import SIZES, Weight
from harness.recipe import Recipe

STATES = {"adamw": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "paged_adamw": 2, "lion_8bit": 1}
"""Moments the size of the weight; Adafactor and SGD have none."""


def stepped_width(recipe: Recipe, weight: Weight) -> int:
    """Bytes of an element of what is stepped: the weight, or its fp32 master copy."""
    return 4 if recipe.master_weights else SIZES[weight.dtype]


def state_bytes(recipe: Recipe, weight: Weight) -> int:
    """State of all tensors of a kind, paged or not. torch's moments have the dtype of what is stepped."""
    n, width, moments = weight.elements, stepped_width(recipe, weight), STATES.get(recipe.optimizer, 0)
    if recipe.optimizer == "adafactor":  # arXiv 1804.04235: a factor a row and a column
        return weight.count * width * (weight.rows + weight.stacked * weight.columns if weight.matrix else n)
    if recipe.optimizer.endswith("8bit") and n >= 4096:
        return weight.count * moments * (n + 4 * -(-n // 256))
    return weight.count * moments * n * (4 if recipe.by_bitsandbytes else width)


def paged_bytes(recipe: Recipe, weight: Weight) -> int:
    """The part of it in unified memory, which the allocator does not see: moments of large tensors."""
    if not recipe.pages_optimizer or weight.elements < 100_000:
        return 0
    each = 1 if recipe.optimizer.endswith("8bit") else 4
    return weight.count * STATES[recipe.optimizer] * weight.elements * each


def passing_share(recipe: Recipe) -> int:
    """Bytes that stepping a tensor needs for a moment, for each byte of it: the root of the second moment
    (adam.py, exp_avg_sq_sqrt), and tensor by tensor that divided; Adafactor's update; SGD's decayed gradient."""
    decays = recipe.optimizer == "sgd" and recipe.weight_decay > 0
    if recipe.optimizer_impl == "fused" or not (decays or recipe.optimizer in ("adamw", "adafactor")):
        return 0
    return 2 if recipe.optimizer == "adamw" and recipe.optimizer_impl == "for_loop" else 1


def step_bytes(recipe: Recipe, trained: Sequence[Weight]) -> int:
    """The most a step holds beside weights, gradients and state: foreach, of all tensors at once."""
    sizes = [(w.elements * stepped_width(recipe, w), w.count) for w in trained]
    one_by_one = recipe.optimizer_impl == "for_loop"
    held = max((size for size, _ in sizes), default=0) if one_by_one else sum(size * n for size, n in sizes)
    return passing_share(recipe) * held


def moved_bytes(recipe: Recipe, trained: Sequence[Weight]) -> int:
    """Bytes that one step reads and writes. An update written as several kernels goes over memory of the
    weight's size once for each thing that a line of it reads or writes (torch/optim/adam.py, sgd.py)."""
    decay = 2 if recipe.weight_decay else 0
    passes = {"adamw": 18 + decay, "adafactor": 18 + decay, "sgd": 3 + 1.5 * decay}.get(recipe.optimizer, 0)
    moved = 0.0
    for weight in trained:
        n, width = weight.elements * weight.count, stepped_width(recipe, weight)
        one_kernel = 3 * n * width + 2 * state_bytes(recipe, weight)  # reads and writes weight and state
        moved += passes * n * width if passes and recipe.optimizer_impl != "fused" else one_kernel
        moved += n * width * (3 * (recipe.max_grad_norm is not None) + 2 * recipe.scaled)
        moved += 12 * n * recipe.master_weights  # gradients to fp32, and weights back to 16 bit
    return int(moved)


def launches(recipe: Recipe, trained: Sequence[Weight]) -> int:
    """Operators of a step; a multi-tensor kernel takes dozens of tensors."""
    each = {"adamw": 8, "adafactor": 12}.get(recipe.optimizer, 1) if recipe.optimizer_impl != "fused" else 1
    count = sum(w.count for w in trained) * each
    one_by_one = recipe.optimizer_impl == "for_loop" or recipe.optimizer in ("adamw_8bit", "lion_8bit")
    return count if one_by_one else -(-count // 32)
