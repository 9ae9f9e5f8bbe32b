"""What a recipe makes of a decoder's weights: their dtype and storage, what trains, and a rank's share.

The facts follow harness/training/model.py: dtypes by precision, bitsandbytes for every linear layer but the
output head (and for stacked experts, in 4 bit), peft's adapters, and its preparation for k-bit training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from harness.architecture import Block, ModelShape
from harness.errors import InputError
from harness.napkin.layers import Matrix, inner_of, matching, matrices_of, vectors_of
from harness.recipe import Recipe, surprises_of_quantization

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element."""
_IA3 = {
    **dict.fromkeys(("llama", "mistral"), ("k_proj", "v_proj", "down_proj")),
    "gpt2": ("c_attn", "mlp.c_proj"),
    **dict.fromkeys(("gpt_neox", "falcon", "bloom"), ("query_key_value", "dense_4h_to_h")),
    "phi": ("q_proj", "v_proj", "fc2"),
}
"""peft.utils.constants, TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING; the others scale q, v and down."""
_ADAPTED_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "olmoe")
"""Families whose experts were linear layers before transformers 5, and to peft's all-linear still are
(peft/utils/transformers_weight_conversion.py)."""


@dataclass(frozen=True)
class Weight:
    """A kind of parameter: `count` tensors of `rows` x `columns` elements."""

    name: str
    rows: int
    columns: int
    dtype: str
    """fp32, bf16, fp16, or the quantized format nf4, fp4, int8."""
    size_bytes: int
    """Of one tensor on one rank, with its quantization constants."""
    trained: bool
    count: int = 1
    formula: str = ""
    matrix: bool = True
    """Two or more dimensions: optimizers factor these only."""
    stacked: int = 1
    adapter: bool = False
    """Added by peft."""

    @property
    def elements(self) -> int:
        """Of one tensor on one rank."""
        return self.rows * self.columns

    @property
    def quantized(self) -> bool:
        return self.dtype not in SIZES

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes


@dataclass(frozen=True)
class BuiltModel:
    """A model shape under a recipe."""

    recipe: Recipe
    whole: ModelShape

    @property
    def shape(self) -> ModelShape:
        """The model's."""
        return self.whole

    @property
    def made_dtype(self) -> str:
        """The dtype in which weights are made: that of a plain precision; under autocast fp32, but a frozen
        base as its config declares it."""
        recipe = self.recipe
        if not recipe.mixed:
            return recipe.precision
        return "fp32" if recipe.trains_base else self.whole.dtype or "fp32"

    @property
    def loose_dtype(self) -> str:
        """The dtype of what is not quantized: k-bit preparation makes it fp32."""
        return "fp32" if self.recipe.upcast_for_kbit else self.made_dtype

    def storage(self, matrix: Matrix) -> str | None:
        """The format bitsandbytes stores a block's matrix in; None if it does not."""
        if not self.recipe.quantized or matrix.role == "router":
            return None
        return self.recipe.quantization if self.recipe.four_bit or matrix.linear else None

    @cached_property
    def matrices(self) -> list[tuple[Block, Matrix]]:
        """Every matrix of every kind of block."""
        return [(block, matrix) for block in self.whole.blocks for matrix in matrices_of(self.whole, block)]

    @cached_property
    def head(self) -> Matrix:
        return Matrix("lm_head", self.whole.hidden, self.whole.vocab, "out")

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices that peft adapts. Raises InputError for a target that the model lacks."""
        recipe, shape = self.recipe, self.whole
        if recipe.trains_base:
            return frozenset()
        found = [matrix for _, matrix in self.matrices]
        if recipe.lora_targets == "all-linear" and recipe.adapter == "lora":
            of_experts = shape.family in _ADAPTED_EXPERTS
            bare = () if not of_experts else ("router",) if recipe.four_bit else ("router", "experts up", "experts down")
            if of_experts and shape.experts and recipe.lora_dropout:
                raise InputError(
                    f"lora_dropout: {recipe.lora_dropout}: peft cannot drop inputs of a mixture's router and "
                    "experts; set lora_dropout: 0, or lora_targets: [q_proj, k_proj, v_proj, o_proj]."
                )
            return frozenset(m.name for m in found if m.linear or m.role in bare)
        targets = recipe.lora_targets
        if targets == "all-linear":
            targets = _IA3.get(shape.family, ("q_proj", "v_proj", "down_proj"))
        names: set[str] = set()
        for target in targets:
            matched = {m.name for m in matching([*found, self.head], target)}
            if not matched:
                known = ", ".join(sorted({m.name.rpartition(".")[2] for m in found if m.linear}))
                raise InputError(
                    f"lora_targets: [{', '.join(targets)}]: {shape.family} has no linear layer {target}; "
                    f"it has {known}."
                )
            names |= matched
        return frozenset(names)

    def adapter_dtype(self, matrix: Matrix) -> str:
        """peft makes adapters fp32, or casts them to the base's dtype: of a 4-bit layer the compute dtype."""
        if self.recipe.adapter_dtype == "fp32":
            return "fp32"
        if not self.storage(matrix):
            return self.loose_dtype
        return self.recipe.compute_dtype if self.recipe.four_bit else "fp32"

    # weights --------------------------------------------------------------------------------------------

    @cached_property
    def outer(self) -> list[Weight]:
        """Embeddings, positions, last norm, and a head of its own."""
        shape, dtype, base = self.whole, self.loose_dtype, self.recipe.trains_base
        table = Matrix("embed_tokens", shape.hidden, shape.vocab, "in")
        weights = [self._plain(table, dtype, base, divided=True)]
        if not shape.tied:
            weights.append(self._plain(self.head, dtype, base, divided=True))
        if shape.positions:
            positions = Matrix("position_embeddings", shape.hidden, shape.positions, "in")
            weights.append(self._plain(positions, dtype, base))
        weights.append(self._vector("norm", shape.hidden * (1 + shape.layer_norm), 1))
        return weights + self._adapters(self.head, 1)

    @cached_property
    def in_blocks(self) -> list[Weight]:
        """The weights of the blocks; `count` is the number of blocks that have one."""
        weights: list[Weight] = []
        for block, matrix in self.matrices:
            weights.append(self._stored(matrix, block.count))
            if matrix.bias:
                weights.append(self._vector(f"{matrix.name}.bias", matrix.outputs, block.count))
            weights += self._adapters(matrix, block.count)
        for block in self.whole.blocks:
            weights.append(self._vector("norms", vectors_of(self.whole, block), block.count))
        return weights

    @property
    def trained(self) -> list[Weight]:
        return [w for w in (*self.outer, *self.in_blocks) if w.trained]

    def _stored(self, matrix: Matrix, count: int) -> Weight:
        storage = self.storage(matrix)
        if storage is None:
            return self._plain(matrix, self.loose_dtype, self.recipe.trains_base, count, divided=matrix.role != "router")
        size, formula = quantized(matrix, storage, self.recipe.double_quant)
        if (ranks := self.recipe.dp_shard) > 1:  # the packed values are a parameter, their scales are not
            packed = -(-matrix.elements // 2)
            size, formula = size - packed + -(-packed // ranks), f"{formula}, the packed half byte / {ranks}"
        rows, columns = matrix.outputs * matrix.stacked, matrix.inputs
        return Weight(matrix.name, rows, columns, storage, size, False, count, formula, stacked=matrix.stacked)

    def _plain(
        self, matrix: Matrix, dtype: str, trained: bool, count: int = 1, *, divided: bool = False, adapter: bool = False
    ) -> Weight:
        """`divided`: tensor parallelism divides it."""
        ranks = self.recipe.dp_shard * (self.recipe.tp if divided else 1)
        rows, columns = -(-matrix.outputs * matrix.stacked // ranks), matrix.inputs
        stack = f"{matrix.stacked}·" if matrix.stacked > 1 else ""
        share = f" / {ranks}" if ranks > 1 else ""
        formula = f"{stack}{matrix.outputs:,}·{columns:,} × {SIZES[dtype]} B{share}"
        size = rows * columns * SIZES[dtype]
        return Weight(
            matrix.name, rows, columns, dtype, size, trained, count, formula, stacked=matrix.stacked, adapter=adapter
        )

    def _vector(self, name: str, elements: int, count: int) -> Weight:
        width, ranks = SIZES[self.loose_dtype], self.recipe.dp_shard
        part = -(-elements // ranks)
        formula = f"{elements:,} × {width} B" + (f" / {ranks}" if ranks > 1 else "")
        trained = self.recipe.trains_base
        return Weight(name, 1, part, self.loose_dtype, part * width, trained, count, formula, matrix=False)

    def _adapters(self, matrix: Matrix, count: int) -> list[Weight]:
        """LoRA: A is rank x inputs, B outputs x rank (arXiv 2106.09685), a pair for each expert. IA3: one
        scale an output, or an input of the last matrix of an MLP (arXiv 2205.05638)."""
        if matrix.name not in self.adapted:
            return []
        dtype, name = self.adapter_dtype(matrix), matrix.name
        if self.recipe.adapter == "ia3":
            feeds = matrix.role == "down" and self.recipe.lora_targets == "all-linear"
            added = [Matrix(f"{name}.ia3", 1, matrix.inputs if feeds else matrix.outputs, "low")]
        else:
            fused = 2 if matrix.role == "experts up" and self.whole.gated else 1
            rank = self.recipe.lora_rank * matrix.stacked * fused
            added = [
                Matrix(f"{name}.lora_A", matrix.inputs, rank, "low"),
                Matrix(f"{name}.lora_B", rank, matrix.outputs, "low"),
            ]
        return [self._plain(m, dtype, True, count, divided=True, adapter=True) for m in added]

    @property
    def buffer_bytes(self) -> int:
        """Rotary frequencies: two fp32 copies of half a head's dimensions."""
        return 0 if self.whole.positions else self.whole.head_dim * SIZES["fp32"]

    @property
    def surprises(self) -> list[str]:
        """What quantization leaves otherwise than the recipe lets expect, as a run and a simulation say it."""
        experts = [(b, m) for b, m in self.matrices if m.stacked > 1 and self.storage(m)]
        left: dict[str, int] = defaultdict(int)
        for weight in self.in_blocks:
            if weight.matrix and not (weight.trained or weight.quantized):
                parameter = weight.name if weight.stacked > 1 else f"{weight.name}.weight"
                left[".".join(parameter.rsplit(".", 2)[-2:])] += weight.total_bytes
        return surprises_of_quantization(
            self.recipe,
            sorted({m.name.rpartition(".")[2] for _, m in experts}),
            sum(b.count * m.elements for b, m in experts),
            left,
            total_bytes([*self.outer, *self.in_blocks]),
        )


def quantized(matrix: Matrix, storage: str, double_quant: bool) -> tuple[int, str]:
    """Bytes of a quantized weight with its constants, and the formula.

    4 bit: half a byte each, a table of 16 fp32 values, and an fp32 maximum for each block of 64; with double
    quantization one byte for each maximum, an fp32 scale for 256 of them, a table of 256 fp32 values and one
    fp32 offset (bitsandbytes.functional.quantize_4bit, 0.50). int8: one byte, and an fp32 scale a row.
    """
    n, rows = matrix.elements, matrix.outputs
    shown = f"{rows * matrix.stacked:,}·{matrix.inputs:,}"
    if storage == "int8":
        return n + 4 * rows, f"{shown} × 1 B + {rows:,} × 4 B scales"
    blocks = -(-n // 64)
    if double_quant:
        maxima = blocks + 4 * -(-blocks // 256) + 4 * 256 + 4
        return -(-n // 2) + 64 + maxima, f"{shown} × (1/2 + 1/64 + 4/(64·256)) B + 1,092 B of tables"
    return -(-n // 2) + 64 + 4 * blocks, f"{shown} × (1/2 + 4/64) B + 64 B of tables"


def total_bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.total_bytes for weight in weights)


__all__ = ["SIZES", "BuiltModel", "Weight", "inner_of", "quantized", "total_bytes"]
