"""An optimizer's state, the temporaries of its step, and the bytes that the step moves. No torch.

Sources: torch/optim/adam.py, sgd.py, _adafactor.py, _muon.py; schedulefree/adamw_schedulefree.py;
torchao/optim (0.18), whose step is compiled; galore_torch/adamw.py (arXiv 2403.03507),
apollo_torch/apollo.py (arXiv 2412.05270);
bitsandbytes/optim/optimizer.py (0.50): 8-bit state from 4,096 elements (arXiv 2110.02861), paged state from
100,000 (arXiv 2305.14314, section 3).
"""

from collections.abc import Sequence

from harness.napkin.weights import SIZES, Weight
from harness.recipe import Recipe

STATES = {
    **{"adamw": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "paged_adamw": 2, "lion_8bit": 1},
    **{"muon": 2, "adamw_schedule_free": 2, "galore_adamw": 2, "apollo_adamw": 2},
}
"""The number of moments as large as the weight that an optimizer keeps; Adafactor and SGD have none. `muon`
has AdamW's for the weights that AdamW steps beside Muon."""


LOW_RANK = ("galore_adamw", "apollo_adamw")
PASSES = {
    **{"adamw": 18, "muon": 18, "adafactor": 18, "adamw_schedule_free": 24, "sgd": 3},
    **dict.fromkeys(LOW_RANK, 20),
}
LAUNCHES = {"adamw": 8, "muon": 8, "adafactor": 12, "adamw_schedule_free": 9, **dict.fromkeys(LOW_RANK, 9)}
"""How often an unfused step without weight decay reads or writes a tensor (PASSES), and how many operators it
launches for it (LAUNCHES). For `muon` both are of what AdamW steps, for LOW_RANK of what is not projected."""
PROJECTED = {"galore_adamw": (6, 4, 2), "apollo_adamw": (11, 12, 1)}
"""For a matrix that is projected: passes over it, operators besides AdamW's, and products with the rank."""
OUTER = ("embed_tokens", "lm_head", "score", "position_embeddings")
"""Weights outside the blocks, which Muon and low-rank optimizers leave to AdamW."""
LOW_BIT = {"adamw_torch_8bit": (256, 8, 8), "adamw_torch_4bit": (128, 4, 24)}
"""For torchao's optimizers: elements of a block, bits of an element, and temporary bytes of an element."""
MUON_PASSES, MUON_ITERATIONS = 14, 5
"""Passes over a matrix, and Newton-Schulz iterations, which are in bf16 whatever the weights are in
(torch/optim/_muon.py)."""


def _learns_faster(weight: Weight) -> bool:
    """Whether LoRA+ gives the weight its higher learning rate, and so another group of parameters."""
    return "lora_B" in weight.name or not weight.matrix


class OptimizerMemory:
    """The bytes and operators of an optimizer that steps the `trained` weights."""

    def __init__(self, recipe: Recipe, trained: Sequence[Weight]) -> None:
        self.recipe, self.trained = recipe, trained
        self.name, self.implementation = recipe.optimizer, recipe.optimizer_impl
        self.in_backward = recipe.optimizer_in_backward  # and each gradient freed when its weight is stepped
        self.width = {w.dtype: 4 if recipe.master_weights else SIZES[w.dtype] for w in trained}
        """Bytes of an element of what is stepped, by dtype of the weight."""
        within = [w for w in trained if w.matrix and w.stacked == 1 and w.name not in OUTER]
        self.hidden = within if recipe.by_muon else []
        """The weights that Muon steps; AdamW steps the others."""
        self.projected = within if recipe.low_rank_optimizer else []
        """The weights whose gradients are projected to `optimizer_rank` dimensions."""
        self.state_bytes = sum(w.count * self.state_of(w) for w in trained)
        large = [w.elements * w.count for w in trained if w.elements >= 100_000 and recipe.pages_optimizer]
        self.paged_bytes = sum(large) * STATES.get(self.name, 0) * (1 if self.name.endswith("8bit") else 4)
        """The part of the state in unified memory, which the allocator does not see: large moments."""
        sizes = [w.elements * self.width[w.dtype] for w in trained for _ in range(w.count)]
        self.gradient_bytes = sum(sizes)  # as they are stepped: cast for master weights
        copied = recipe.master_weights or (recipe.optimizer_on_host and not recipe.parameters_on_host)
        self.copy_bytes = sum(sizes) if copied else 0
        """Copies that are stepped instead of the model's weights: fp32 master weights, or on the host."""
        rest = [w for w in trained if w not in self.hidden]
        sizes = [w.elements * self.width[w.dtype] for w in rest for _ in range(w.count)]
        adam, also = self.name in ("adamw", "muon"), ("adafactor", "adamw_schedule_free")
        decays, passing = self.name == "sgd" and recipe.weight_decay > 0, adam or self.name in also
        passing, low_rank = passing or recipe.low_rank_optimizer, recipe.low_rank_optimizer
        one_by_one = self.implementation == "for_loop" or low_rank
        self.share = (1 + (one_by_one and (adam or low_rank))) * (
            (decays or passing) and self.implementation != "fused"
        )
        """Temporary bytes for each byte that is stepped: for AdamW, the root of the second moment."""
        together = sum(sizes)
        if recipe.lora_plus_ratio is not None:  # two groups, one after the other
            fast = sum(w.elements * w.count * self.width[w.dtype] for w in trained if _learns_faster(w))
            together = max(fast, together - fast)
        self.step_bytes = self.share * (max(sizes, default=0) if one_by_one else together)
        self.step_bytes = max(self.step_bytes, *map(self._muon_bytes, self.hidden), 0)
        """The largest temporaries of a step; `foreach` makes those of all tensors at once."""
        if recipe.by_torchao:
            made = LOW_BIT[self.name][2]
            self.step_bytes = made * max((w.elements for w in trained if self._in_blocks(w)), default=0)

    def _in_blocks(self, weight: Weight) -> bool:
        """Whether torchao keeps the moments of `weight` in few bits."""
        return weight.elements >= 4096 and weight.elements % LOW_BIT[self.name][0] == 0

    def state_of(self, weight: Weight) -> int:
        """Bytes of one tensor's state, paged or not. torch's moments have the dtype of what is stepped."""
        n, width, moments = weight.elements, self.width[weight.dtype], STATES.get(self.name, 0)
        if self.recipe.by_torchao:  # with a scale for each block, and a table of values for each moment
            block, bits, _ = LOW_BIT[self.name]
            in_blocks = n * bits // 8 + 4 * n // block + 4 * 2**bits
            return 2 * (in_blocks if self._in_blocks(weight) else n * width)
        if weight in self.hidden:
            return n * width
        if weight in self.projected:  # two moments of the long side, and what projects the short one
            long, short = max(weight.rows, weight.columns), min(weight.rows, weight.columns)
            rank = self.recipe.optimizer_rank
            if self.name == "apollo_adamw":
                return (2 * long + short) * rank * width
            rank = min(rank, short)
            # in fp32 its singular vectors are a part of all that there are, and keep them
            return (2 * long * rank + short * (short if width == 4 else rank)) * width
        if self.name == "adafactor":  # arXiv 1804.04235: a factor a row and a column
            return width * (weight.rows + weight.stacked * weight.columns if weight.matrix else n)
        if self.name.endswith("8bit") and n >= 4096:
            return moments * (n + 4 * -(-n // 256))
        return moments * n * (4 if self.recipe.by_bitsandbytes else width)

    def _muon_bytes(self, weight: Weight) -> int:
        """The temporary bytes of Muon's step of one matrix: Nesterov's momentum, and in bf16 two iterates
        with two products X·Xᵀ, or one iterate with three."""
        n, square = weight.elements, min(weight.rows, weight.columns) ** 2
        return n * self.width[weight.dtype] + max(4 * n + 4 * square, 2 * n + 6 * square)

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """(FLOPs, bytes moved, launches) of the step's matrix products: Muon's in bf16 (X·Xᵀ, its square, and
        that times X), or those that project gradients, in the gradients' dtype."""
        found: list[tuple[int, int, int]] = []
        for weight in self.projected:
            times, rank = weight.count * PROJECTED[self.name][2], self.recipe.optimizer_rank
            read = weight.elements + rank * (weight.rows + weight.columns)
            flops, moved = 2 * rank * weight.elements, read * self.width[weight.dtype]
            found.append((times * flops, times * moved, times))
        for weight in self.hidden:
            n, short = weight.elements, min(weight.rows, weight.columns)
            flops, moved = 4 * short * n + 2 * short**3, 2 * (4 * n + 6 * short**2)
            times = MUON_ITERATIONS * weight.count
            found.append((times * flops, times * moved, times * 3))
        return found

    @property
    def products_in(self) -> str:
        """The dtype of these products."""
        return "bf16" if self.hidden or 2 in self.width.values() else "fp32"

    @property
    def moved_bytes(self) -> int:
        """The bytes that one step reads and writes, with a kernel for each line of adam.py or sgd.py, or one
        for all of them if it is fused."""
        recipe, moved, decay = self.recipe, 0.0, 2 if self.recipe.weight_decay else 0
        passes = PASSES.get(self.name, 0)
        passes += decay * (1.5 if self.name == "sgd" else 1) if passes else 0
        for weight in self.trained:
            n, width = weight.elements * weight.count, self.width[weight.dtype]
            one_kernel = 3 * n * width + 2 * weight.count * self.state_of(weight)
            if self.recipe.by_torchao and self._in_blocks(weight):
                one_kernel += 2 * n * LOW_BIT[self.name][2]
            if weight in self.hidden:
                moved += MUON_PASSES * n * width
            elif weight in self.projected:
                moved += PROJECTED[self.name][0] * n * width
            else:
                moved += passes * n * width if passes and self.implementation != "fused" else one_kernel
            moved += n * width * (3 * (recipe.max_grad_norm is not None) + 2 * recipe.scaled)
            moved += 12 * n * recipe.master_weights  # gradients to fp32, and weights back to 16 bit
        return int(moved)

    @property
    def launches(self) -> int:
        """The number of operators that a step launches. A multi-tensor kernel steps dozens of tensors."""
        each = LAUNCHES.get(self.name, 1) if self.implementation != "fused" else 1
        muon = 9 * sum(w.count for w in self.hidden)
        count = sum(w.count for w in self.trained if w not in self.hidden) * each
        count += sum(w.count for w in self.projected) * PROJECTED.get(self.name, (0, 0, 0))[1]
        one_by_one = self.implementation == "for_loop" or self.name in ("adamw_8bit", "lion_8bit")
        one_by_one |= self.recipe.low_rank_optimizer or self.recipe.by_torchao
        return muon + (count if one_by_one else -(-count // 32))
