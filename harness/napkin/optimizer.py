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


def _learns_faster(weight: Weight) -> bool:
    return "lora_B" in weight.name or not weight.matrix


class OptimizerMemory:
    """Bytes of an optimizer over `trained` weights."""

    def __init__(self, recipe: Recipe, trained: Sequence[Weight]) -> None:
        self.recipe, self.trained = recipe, trained
        self.name, self.implementation = recipe.optimizer, recipe.optimizer_impl
        self.in_backward = recipe.optimizer_in_backward  # and each gradient freed when its weight is stepped
        self.width = {
            w.dtype: 4 if recipe.master_weights else SIZES[w.dtype] for w in trained
        }  # of an element
        self.state_bytes = sum(w.count * self.state_of(w) for w in trained)
        large = [w.elements * w.count for w in trained if w.elements >= 100_000 and recipe.pages_optimizer]
        self.paged_bytes = sum(large) * STATES.get(self.name, 0) * (1 if self.name.endswith("8bit") else 4)
        """The part in unified memory, which the allocator does not see: moments of large tensors."""
        sizes = [w.elements * self.width[w.dtype] for w in trained for _ in range(w.count)]
        self.gradient_bytes = sum(sizes)  # as they are stepped: cast for master weights
        copied = recipe.master_weights or (recipe.optimizer_on_host and not recipe.parameters_on_host)
        self.copy_bytes = sum(sizes) if copied else 0
        """Weights that are stepped in place of the model's: fp32 master weights, or those on the host."""
        decays, passing = self.name == "sgd" and recipe.weight_decay > 0, self.name in ("adamw", "adafactor")
        one_by_one = self.implementation == "for_loop"
        self.share = (1 + (one_by_one and self.name == "adamw")) * (
            (decays or passing) and self.implementation != "fused"
        )
        """Bytes that stepping a byte needs for a moment: of AdamW, the root of the second moment."""
        together = sum(sizes)
        if recipe.lora_plus_ratio is not None:  # two groups, one after the other
            fast = sum(w.elements * w.count * self.width[w.dtype] for w in trained if _learns_faster(w))
            together = max(fast, together - fast)
        self.step_bytes = self.share * (max(sizes, default=0) if one_by_one else together)
        """The most that a step holds beside weights, gradients and state; foreach, of all tensors at once."""

    def state_of(self, weight: Weight) -> int:
        """State of one tensor, paged or not. torch's moments have the dtype of what is stepped."""
        n, width, moments = weight.elements, self.width[weight.dtype], STATES.get(self.name, 0)
        if self.name == "adafactor":  # arXiv 1804.04235: a factor a row and a column
            return width * (weight.rows + weight.stacked * weight.columns if weight.matrix else n)
        if self.name.endswith("8bit") and n >= 4096:
            return moments * (n + 4 * -(-n // 256))
        return moments * n * (4 if self.recipe.by_bitsandbytes else width)

    @property
    def moved_bytes(self) -> int:
        """What one step reads and writes: by a kernel for each line of adam.py or sgd.py, or by one."""
        recipe, moved, decay = self.recipe, 0.0, 2 if self.recipe.weight_decay else 0
        passes = {"adamw": 18 + decay, "adafactor": 18 + decay, "sgd": 3 + 1.5 * decay}.get(self.name, 0)
        for weight in self.trained:
            n, width = weight.elements * weight.count, self.width[weight.dtype]
            one_kernel = 3 * n * width + 2 * weight.count * self.state_of(weight)
            moved += passes * n * width if passes and self.implementation != "fused" else one_kernel
            moved += n * width * (3 * (recipe.max_grad_norm is not None) + 2 * recipe.scaled)
            moved += 12 * n * recipe.master_weights  # gradients to fp32, and weights back to 16 bit
        return int(moved)

    @property
    def launches(self) -> int:
        """Operators of a step; a multi-tensor kernel takes dozens of tensors."""
        each = {"adamw": 8, "adafactor": 12}.get(self.name, 1) if self.implementation != "fused" else 1
        count = sum(w.count for w in self.trained) * each
        one_by_one = self.implementation == "for_loop" or self.name in ("adamw_8bit", "lion_8bit")
        return count if one_by_one else -(-count // 32)
