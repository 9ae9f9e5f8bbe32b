"""What a recipe makes of a decoder's weights: their dtype and storage, what trains, and a rank's share.

The facts follow harness/training/model.py: dtypes by precision, bitsandbytes for every linear layer but the
output head (and for stacked experts, in 4 bit), peft's adapters, and its preparation for k-bit training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from harness.architecture import Block, Matrix, ModelShape, matrices_of, vectors_of
from harness.errors import InputError
from harness.recipe import Recipe, surprises_of_quantization

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element."""
_ADAPTED_EXPERTS = (
    *("mixtral", "minimax", "deepseek_v2", "deepseek_v3", "qwen3_moe", "qwen3_next", "olmoe", "flex_olmo"),
    *("glm4_moe", "dots1", "ernie4_5_moe", "longcat_flash", "hunyuan_v1_moe", "exaone_moe", "afmoe"),
)
"""Families whose experts were linear layers before transformers 5, and to peft's all-linear still are
(peft/utils/transformers_weight_conversion.py, 0.21)."""


@dataclass(frozen=True)
class Weight:
    """A kind of parameter: `count` tensors of `rows` x `columns` elements on a rank."""

    name: str
    rows: int
    columns: int
    dtype: str
    """fp32, bf16, fp16, or the quantized format nf4, fp4, int8."""
    size_bytes: int
    """Of one tensor, with its quantization constants."""
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
    shape: ModelShape

    @property
    def lora(self) -> bool:
        """Whether matrices are adapted by products of two small ones; otherwise, if at all, by scales."""
        return self.recipe.adapter == "lora"

    @property
    def rank(self) -> int:
        return self.recipe.lora_rank

    @property
    def made_dtype(self) -> str:
        """The dtype in which weights are made: that of a plain precision; under autocast fp32, but a frozen
        base as its config declares it."""
        if not self.recipe.mixed:
            return self.recipe.precision
        return "fp32" if self.recipe.trains_base else self.shape.dtype or "fp32"

    @property
    def loose_dtype(self) -> str:
        """The dtype of what is not quantized: k-bit preparation makes it fp32."""
        return "fp32" if self.recipe.upcast_for_kbit else self.made_dtype

    def storage(self, matrix: Matrix) -> str | None:
        """The format bitsandbytes stores a block's matrix in; None if it does not."""
        kind = matrix.linear or (self.recipe.four_bit and matrix.stacked > 1)
        return self.recipe.quantization if self.recipe.quantized and kind and matrix != self.head else None

    @cached_property
    def matrices(self) -> list[tuple[Block, Matrix]]:
        """Every matrix of every kind of block."""
        return [(block, matrix) for block in self.shape.blocks for matrix in matrices_of(self.shape, block)]

    @property
    def head(self) -> Matrix:
        return Matrix("lm_head", self.shape.hidden, self.shape.vocab, "out")

    @cached_property
    def adapted(self) -> frozenset[str]:
        """Names of the matrices that peft adapts. Raises InputError for a target that the model lacks.

        peft's choice for IA3 is keys or queries, values, and the MLP's last matrix
        (peft.utils.constants, TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING).
        """
        recipe, found = self.recipe, [matrix for _, matrix in self.matrices]
        if recipe.trains_base:
            return frozenset()
        if recipe.lora_targets != "all-linear":
            matched = {
                t: [m.name for m in (*found, self.head) if f".{m.name}".endswith(f".{t}")]
                for t in recipe.lora_targets
            }
            for target in (target for target, names in matched.items() if not names):
                known = ", ".join(sorted({m.name.rpartition(".")[2] for m in found if m.linear}))
                raise InputError(
                    f"lora_targets: {self.shape.family} has no linear layer {target}; it has {known}."
                )
            return frozenset(name for names in matched.values() for name in names)
        if not self.lora:
            ends = ("k_proj", "v_proj", "c_attn", "query_key_value", "qkv_proj")
            return frozenset(m.name for m in found if m.role == "down" or m.name.endswith(ends))
        mixture = self.shape.family in _ADAPTED_EXPERTS
        bare = ("router", *(() if recipe.four_bit else ("expert up", "expert down"))) if mixture else ()
        return frozenset(m.name for m in found if m.linear or m.role in bare)

    def adapter_dtype(self, matrix: Matrix) -> str:
        """peft makes adapters fp32, or casts them to the base's dtype: of a 4-bit layer the compute dtype."""
        if self.recipe.adapter_dtype == "fp32" or self.storage(matrix) == "int8":
            return "fp32"
        return self.recipe.compute_dtype if self.storage(matrix) else self.loose_dtype

    @cached_property
    def outer(self) -> list[Weight]:
        """Embeddings, positions, last norm, and a head of its own."""
        shape = self.shape
        parts = [
            Matrix("embed_tokens", shape.hidden, shape.vocab, "in"),
            *([] if shape.tied else [self.head]),
        ]
        parts += (
            [Matrix("position_embeddings", shape.hidden, shape.positions, "in")] if shape.positions else []
        )
        parts.append(Matrix("norm", 1, shape.hidden * (1 + shape.layer_norm), "vector"))
        return [*(self._weight(part, 1, loose=True) for part in parts), *self._adapters(self.head, 1)]

    @cached_property
    def in_blocks(self) -> list[Weight]:
        """The weights of the blocks; `count` is the number of blocks that have one."""
        weights: list[Weight] = []
        for block, matrix in self.matrices:
            bias = Matrix(f"{matrix.name}.bias", 1, matrix.outputs, "vector")
            weights += [self._weight(part, block.count) for part in (matrix, bias)[: 1 + matrix.bias]]
            weights += self._adapters(matrix, block.count)
        for block in self.shape.blocks:
            norms = Matrix("norms", 1, vectors_of(self.shape, block), "vector")
            weights.append(self._weight(norms, block.count))
        return weights

    def _weight(self, matrix: Matrix, count: int, dtype: str = "", *, loose: bool = False) -> Weight:
        """What a rank has of `matrix`; `dtype`: of an adapter, `loose`: never quantized."""
        recipe, rows = self.recipe, matrix.outputs * matrix.stacked
        storage, shards = None if loose or dtype else self.storage(matrix), recipe.dp_shard
        kept, vector = dtype or self.loose_dtype, matrix.role == "vector"
        if storage:
            size, formula = quantized(matrix, storage, recipe.double_quant)
            if shards > 1:  # the packed values are a parameter, their scales are not
                packed = -(-matrix.elements // 2)
                size, formula = size - packed + -(-packed // shards), f"{formula}, the half bytes / {shards}"
        else:
            ranks = shards * (1 if matrix.role in ("router", "vector") else recipe.tp)
            rows, stack = -(-rows // ranks), f"{matrix.stacked}·" * (matrix.stacked > 1)
            shown = f"{matrix.outputs:,}" if vector else f"{stack}{matrix.outputs:,}·{matrix.inputs:,}"
            formula = f"{shown} × {SIZES[kept]} B" + f" / {ranks}" * (ranks > 1)
            size = rows * matrix.inputs * SIZES[kept]
        trained = not storage and (bool(dtype) or recipe.trains_base)
        kind = (trained, count, formula, not vector, matrix.stacked, bool(dtype))
        return Weight(matrix.name, rows, matrix.inputs, storage or kept, size, *kind)

    def _adapters(self, matrix: Matrix, count: int) -> list[Weight]:
        """LoRA: A is rank x inputs, B outputs x rank (arXiv 2106.09685), a pair for each expert, and for each
        of two that are fused. IA3: a scale for each output, or input of an MLP's last (arXiv 2205.05638)."""
        name, rank = matrix.name, self.rank * matrix.stacked
        if name not in self.adapted:
            return []
        rank *= 2 if matrix.role == "expert up" and self.shape.gated else 1
        sides = [Matrix(f"{name}.lora_A", matrix.inputs, rank, "low")]
        sides += [Matrix(f"{name}.lora_B", rank, matrix.outputs, "low")]
        if not self.lora:
            feeds = matrix.role == "down" and self.recipe.lora_targets == "all-linear"
            sides = [Matrix(f"{name}.ia3", 1, matrix.inputs if feeds else matrix.outputs, "low")]
        return [self._weight(side, count, self.adapter_dtype(matrix)) for side in sides]

    @property
    def buffer_bytes(self) -> int:
        """Rotary frequencies: two fp32 copies of half a head's dimensions."""
        return 0 if self.shape.positions else self.shape.head_dim * SIZES["fp32"]

    @property
    def surprises(self) -> list[str]:
        """What quantization leaves otherwise than a recipe lets expect, as a run and a simulation say it."""
        experts = [(b.count, m) for b, m in self.matrices if m.stacked > 1 and self.storage(m)]
        left: dict[str, int] = defaultdict(int)
        for weight in self.in_blocks:
            if weight.matrix and not (weight.trained or weight.quantized):
                parameter = weight.name if weight.stacked > 1 else f"{weight.name}.weight"
                left[".".join(parameter.rsplit(".", 2)[-2:])] += weight.total_bytes
        names = sorted({m.name.rpartition(".")[2] for _, m in experts})
        elements, every = sum(n * m.elements for n, m in experts), [*self.outer, *self.in_blocks]
        return surprises_of_quantization(self.recipe, names, elements, left, total_bytes(every))


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
