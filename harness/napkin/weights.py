"""The weights of a model as a recipe trains it: dtype, storage, what trains, and a rank's share. No torch.

It follows harness/training/model.py: bitsandbytes quantizes linear layers but the head, peft makes adapters.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from harness.architecture import (
    TOWER,
    Matrix,
    ModelShape,
    adapted_names,
    head_of,
    ia3_parts,
    lora_parts,
    matrices_of,
    outer_parts,
    parts_of,
    quantized,
    surprises_of_saved_weights,
)
from harness.errors import InputError
from harness.recipe import Recipe, shown, surprises_of_quantization

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element by dtype."""
NEUTRAL_IN_PEFT = {"init_lora_weights", "alpha_pattern"}
"""Fields of peft's LoraConfig that change the values of weights and nothing else."""


@dataclass(frozen=True)
class Weight:
    """Equal parameters of a rank: `count` tensors of `rows` x `columns` elements."""

    name: str
    rows: int
    columns: int
    dtype: str  # or the quantized format: nf4, fp4, int8
    size_bytes: int  # of one tensor, with its quantization constants
    trained: bool
    count: int = 1
    formula: str = ""
    matrix: bool = True  # and no vector
    stacked: int = 1  # the experts whose matrices it holds
    adapter: bool = False  # whether it belongs to an adapter

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def quantized(self) -> bool:
        return self.dtype not in SIZES

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes


class BuiltModel:
    """A model's weights as a recipe trains them."""

    def __init__(self, recipe: Recipe, shape: ModelShape) -> None:
        """Raises InputError for a layer in lora_targets that the model does not have."""
        unpriced = recipe.adapter == "peft" or recipe.peft.keys() - NEUTRAL_IN_PEFT
        if unpriced:
            raise InputError(
                f"peft: {shown(recipe.peft)}: napkin prices LoRA, DoRA and IA3 as a recipe's own fields have "
                "them, and not what peft's other fields change. Ask `harness simulate`."
            )
        if recipe.train_vision:
            raise InputError(
                "train_vision: true: napkin counts an image tower's weights, and not what it keeps for "
                "backward. Ask `harness simulate`."
            )
        self.recipe, self.shape, base = recipe, shape, recipe.trains_base
        self.lora, self.rank = recipe.adapter == "lora", recipe.lora_rank
        self.lengths = recipe.use_dora
        """Whether DoRA trains the length of each row too."""
        frozen_dtype = "fp32" if base else shape.dtype or "fp32"
        self.made_dtype = frozen_dtype if recipe.mixed else recipe.precision
        """The dtype in which weights are made: that of a plain precision; under autocast fp32, or for a
        frozen base the model's own."""
        self.loose_dtype = "fp32" if recipe.upcast_for_kbit else self.made_dtype  # of what is not quantized
        self.matrices = [(block, matrix) for block in shape.blocks for matrix in matrices_of(shape, block)]
        self.head = head_of(shape, recipe.head_outputs)
        self.adapted = frozenset[str]()
        """The names of the matrices that have an adapter."""
        if not base:
            targets, four_bit = recipe.lora_targets, recipe.four_bit
            self.adapted = adapted_names(shape, self.head, targets, lora=self.lora, four_bit=four_bit)
        outside = outer_parts(shape, recipe.head_outputs)
        self.outer = [*map(self._weight, outside), *self._adapters(self.head, 1)]
        """The weights outside of blocks: embeddings, positions, last norm, and a head that is not tied."""
        if recipe.scores and not base:  # peft trains a copy
            self.outer.append(self._weight(self.head, adapter=self.loose_dtype))
        self.in_blocks: list[Weight] = []
        """The weights in blocks; `count` is the number of blocks that have one."""
        for block in shape.blocks:
            for part in parts_of(shape, block):
                self.in_blocks.append(self._weight(part, block.count, stored=True))
                self.in_blocks += self._adapters(part, block.count)
        self.buffer_bytes = 0 if shape.positions else shape.head_dim * 4  # rotary frequencies

    def storage(self, matrix: Matrix) -> str | None:
        """The format in which bitsandbytes stores a block's matrix; None if it is not quantized."""
        kind = matrix.linear or (self.recipe.four_bit and matrix.stacked > 1)
        return self.recipe.quantization if self.recipe.quantized and kind and matrix != self.head else None

    def in_fp8(self, matrix: Matrix) -> bool:
        """Whether the products with `matrix` are torchao's, in fp8."""
        return self.recipe.fp8 and matrix.linear and matrix != self.head

    def adapter_dtype(self, matrix: Matrix) -> str:
        """The dtype of the adapter of `matrix`. peft makes adapters in fp32, or casts them to the dtype of
        the base: for a 4-bit layer the compute dtype."""
        if self.recipe.adapter_dtype == "fp32" or self.storage(matrix) == "int8":
            return "fp32"
        return self.recipe.compute_dtype if self.storage(matrix) else self.loose_dtype

    def stored(self, matrix: Matrix) -> tuple[int, str]:
        """The bytes of a matrix that is quantized, of all ranks together, and their formula."""
        return quantized(matrix, self.storage(matrix) or "", self.recipe.double_quant)

    def _weight(self, matrix: Matrix, count: int = 1, adapter: str = "", *, stored: bool = False) -> Weight:
        """A rank's part of `matrix`. `adapter` is the dtype of an adapter's matrix, and empty for any other;
        `stored` is whether it is quantized if the recipe quantizes."""
        recipe, rows, shards = self.recipe, matrix.outputs * matrix.stacked, self.recipe.dp_shard
        storage, kept = self.storage(matrix) if stored else None, adapter or self.loose_dtype
        vector, shown = matrix.role == "vector", f"{rows:,}·{matrix.inputs:,}"
        if storage:
            size, formula = self.stored(matrix)
            if shards > 1:  # the packed values are a parameter, their scales are not
                packed = -(-matrix.elements // 2)
                size, formula = size - packed + -(-packed // shards), f"{formula}, the half bytes / {shards}"
        else:
            ranks = shards * (1 if matrix.role in ("router", "vector") else recipe.tp)
            rows, shown = -(-rows // ranks), f"{rows:,}" if vector else shown
            formula = f"{shown} × {SIZES[kept]} B" + f" / {ranks}" * (ranks > 1)
            size = rows * matrix.inputs * SIZES[kept]
        frozen = matrix.name == TOWER and not recipe.train_vision
        trained = not storage and not frozen and (bool(adapter) or recipe.trains_base)
        kind = (trained, count, formula, not vector, matrix.stacked, bool(adapter))
        return Weight(matrix.name, rows, matrix.inputs, storage or kept, size, *kind)

    def _adapters(self, matrix: Matrix, count: int) -> list[Weight]:
        """The adapter's weights for `matrix`."""
        if matrix.name not in self.adapted:
            return []
        lora = lora_parts(self.shape, matrix, self.rank, lengths=self.lengths)
        parts = lora if self.lora else ia3_parts(matrix, listed=self.recipe.lora_targets != "all-linear")
        return [self._weight(part, count, self.adapter_dtype(matrix)) for part in parts]

    @property
    def surprises(self) -> list[str]:
        """Warnings about what quantization leaves unquantized against expectation, with the words that a run
        and a simulation use, and about what napkin does not count."""
        experts = [(b.count, m) for b, m in self.matrices if m.stacked > 1 and self.storage(m)]
        left: dict[str, int] = defaultdict(int)
        for weight in self.in_blocks:
            if weight.matrix and not (weight.trained or weight.quantized):
                parameter = weight.name if weight.stacked > 1 else f"{weight.name}.weight"
                left[".".join(parameter.rsplit(".", 2)[-2:])] += weight.total_bytes
        names = sorted({m.name.rpartition(".")[2] for _, m in experts})
        elements, every = sum(n * m.elements for n, m in experts), [*self.outer, *self.in_blocks]
        unseen = "of an image tower napkin counts the weights, and not what computing with them takes"
        return [
            *[unseen] * (self.shape.tower > 0),
            *surprises_of_saved_weights(self.recipe),
            *surprises_of_quantization(self.recipe, names, elements, left, total_bytes(every)),
        ]


def total_bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.total_bytes for weight in weights)
