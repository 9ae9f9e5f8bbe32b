"""An optimizer's state, the temporaries of its step, and the bytes that the step moves. No torch.

Sources: torch/optim/adam.py, sgd.py, _adafactor.py, _muon.py; schedulefree/adamw_schedulefree.py;
torchao/optim (0.18), whose step is compiled; galore_torch/adamw.py (arXiv 2403.03507),
apollo_torch/apollo.py (arXiv 2412.05270);
bitsandbytes/optim/optimizer.py (0.50): 8-bit state from 4,096 elements (arXiv 2110.02861), paged state from
100,000 (arXiv 2305.14314, section 3).
"""

from collections.abc import Sequence
from typing import NamedTuple

from harness.hardware import Work
from harness.napkin.weights import SIZES, Weight
from harness.recipe import Recipe


class Method(NamedTuple):
    """How an optimizer steps a weight. Muon's and the low-rank ones' are of what is left to AdamW."""

    moments: int
    """How many tensors as large as the weight it keeps."""
    passes: int = 0
    """How often an unfused step without weight decay reads or writes a tensor; 0 for a step in one kernel."""
    launches: int = 1
    """How many operators an unfused step launches for a tensor."""
    alone: int = 1
    """How many temporaries as large as the weight an unfused step of that weight alone makes; a step of all
    weights at once makes one."""


METHODS = {
    **dict.fromkeys(("adamw", "muon"), Method(2, 18, 8, alone=2)),
    **dict.fromkeys(("galore_adamw", "apollo_adamw"), Method(2, 20, 9, alone=2)),
    **{"adamw_schedule_free": Method(2, 24, 9), "adafactor": Method(0, 18, 12), "sgd": Method(0, 3)},
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit", "paged_adamw"), Method(2)),
    **{"lion_8bit": Method(1), "adamw_torch_8bit": Method(2), "adamw_torch_4bit": Method(2)},
}
PROJECTED = {"galore_adamw": (6, 4, 2), "apollo_adamw": (11, 12, 1)}
"""For a matrix that is projected: passes over it, operators besides AdamW's, and products with the rank."""
OUTER = ("embed_tokens", "lm_head", "score", "position_embeddings")
"""Weights outside the blocks, which Muon and low-rank optimizers leave to AdamW."""
LOW_BIT = {"adamw_torch_8bit": (256, 8, 8), "adamw_torch_4bit": (128, 4, 24)}
"""For torchao's optimizers: elements of a block, bits of an element, and temporary bytes of an element."""
MUON_PASSES, MUON_ITERATIONS = 14, 5
"""Passes over a matrix, and Newton-Schulz iterations, which are in bf16 whatever the weights are in
(torch/optim/_muon.py)."""


class OptimizerMemory:
    """The bytes and operators of an optimizer that steps the `trained` weights."""

    def __init__(self, recipe: Recipe, trained: Sequence[Weight]) -> None:
        self.recipe, self.trained = recipe, trained
        self.name, self.implementation = recipe.optimizer, recipe.optimizer_impl
        self.method, fused = METHODS[self.name], recipe.optimizer_impl == "fused"
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
        self.paged_bytes = sum(large) * self.method.moments * (1 if self.name.endswith("8bit") else 4)
        """The part of the state in unified memory, which the allocator does not see: large moments."""
        self.gradient_bytes = self._stepped_bytes(trained)  # cast for master weights
        copied = recipe.master_weights or (recipe.optimizer_on_host and not recipe.parameters_on_host)
        self.copy_bytes = self.gradient_bytes if copied else 0
        """Copies that are stepped instead of the model's weights: fp32 master weights, or on the host."""
        self.one_by_one = self.implementation == "for_loop" or recipe.low_rank_optimizer
        makes = self.method.passes > 0 and not fused and (self.name != "sgd" or recipe.weight_decay > 0)
        self.share = makes * (self.method.alone if self.one_by_one else 1)
        """Temporary bytes for each byte that is stepped: for AdamW, the root of the second moment."""
        self.step_bytes = self._temporary_bytes()

    def _stepped_bytes(self, weights: Sequence[Weight]) -> int:
        """The bytes of all these weights in the dtype in which they are stepped."""
        return sum(w.elements * w.count * self.width[w.dtype] for w in weights)

    def _temporary_bytes(self) -> int:
        """The largest temporaries of a step; `foreach` makes those of all tensors at once."""
        if self.recipe.by_torchao:
            made = LOW_BIT[self.name][2]
            return made * max((w.elements for w in self.trained if self._in_blocks(w)), default=0)
        rest = [w for w in self.trained if w not in self.hidden]
        together = self._stepped_bytes(rest)
        if self.recipe.lora_plus_ratio is not None:  # two groups, one after the other
            fast = self._stepped_bytes([w for w in rest if "lora_B" in w.name or not w.matrix])
            together = max(fast, together - fast)
        if self.one_by_one:
            together = max((w.elements * self.width[w.dtype] for w in rest), default=0)
        return max(self.share * together, *map(self._muon_bytes, self.hidden), 0)

    def _in_blocks(self, weight: Weight) -> bool:
        """Whether torchao keeps the moments of `weight` in few bits."""
        return weight.elements >= 4096 and weight.elements % LOW_BIT[self.name][0] == 0

    def state_of(self, weight: Weight) -> int:
        """Bytes of one tensor's state, paged or not. torch's moments have the dtype of what is stepped."""
        n, width, moments = weight.elements, self.width[weight.dtype], self.method.moments
        if self.recipe.by_torchao:  # with a scale for each block, and a table of values for each moment
            block, bits, _ = LOW_BIT[self.name]
            in_blocks = n * bits // 8 + 4 * n // block + 4 * 2**bits
            return moments * (in_blocks if self._in_blocks(weight) else n * width)
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
    def products(self) -> list[Work]:
        """The step's matrix products: Muon's in bf16 (X·Xᵀ, its square, and that times X), or those that
        project gradients, in the gradients' dtype."""
        found = list[Work]()
        for weight in self.projected:
            rank, times = self.recipe.optimizer_rank, weight.count * PROJECTED[self.name][2]
            width = self.width[weight.dtype]
            dtype = weight.dtype if width == 2 else "fp32"
            moved = (weight.elements + rank * (weight.rows + weight.columns)) * width
            found.append(Work(2 * rank * weight.elements, moved, 1, "matmul", dtype).times(times))
        for weight in self.hidden:
            n, short = weight.elements, min(weight.rows, weight.columns)
            flops, moved = 4 * short * n + 2 * short**3, 2 * (4 * n + 6 * short**2)
            found.append(Work(flops, moved, 3, "matmul", "bf16").times(MUON_ITERATIONS * weight.count))
        return found

    @property
    def update(self) -> Work:
        """What one step moves besides, with a kernel for each line of adam.py or sgd.py, or one for all of
        them if it is fused. A multi-tensor kernel steps dozens of tensors, each of which takes the host about
        as long as an operator where it is not fused."""
        recipe, moved, launches, own_launches, elements = self.recipe, 0.0, 0, 0, 0
        passes, each, *_ = self.method[1:] if self.implementation != "fused" else (0, 1)
        passes += (3 if self.name == "sgd" else 2) * (recipe.weight_decay > 0) if passes else 0
        for weight in self.trained:
            count, n = weight.count, weight.elements * weight.count
            size = n * self.width[weight.dtype]
            moved += size * (3 * (recipe.max_grad_norm is not None) + 2 * recipe.scaled)
            moved += 12 * n * recipe.master_weights  # gradients to fp32, and weights back to 16 bit
            if weight in self.hidden:
                moved, own_launches = moved + MUON_PASSES * size, own_launches + 9 * count
                continue
            launches += count * each
            if weight in self.projected:
                own_passes, more, _ = PROJECTED[self.name]
                moved, launches = moved + own_passes * size, launches + count * more
            elif passes:
                moved, elements = moved + passes * size, elements + (each + (recipe.weight_decay > 0)) * n
            else:
                moved += 3 * size + 2 * count * self.state_of(weight)
                if recipe.by_torchao and self._in_blocks(weight):
                    moved += 2 * n * LOW_BIT[self.name][2]
        alone = self.one_by_one or recipe.by_torchao or self.name in ("adamw_8bit", "lion_8bit")
        by_host = sum(w.count for w in self.trained) * (self.implementation != "fused")
        own_launches += launches if alone else -(-launches // 32) + by_host
        walk = "elementwise" if self.one_by_one or not elements else "foreach"
        return Work(0, int(moved), own_launches, walk=walk, elements=elements)
