"""The matrices of a decoder that peft adapts, and the matrices that an adapter adds. Imports no torch."""

from collections.abc import Sequence
from typing import Literal

from harness.architecture.layers import Matrix, matrices_of
from harness.architecture.model_shape import ModelShape
from harness.errors import InputError

_EXPERTS_ONCE_LINEAR = (
    *("mixtral", "minimax", "minimax_m2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "qwen3_moe"),
    *("qwen3_next", "mellum", "olmoe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "dots1"),
    *("ernie4_5_moe", "longcat_flash", "hunyuan_v1_moe", "exaone_moe", "afmoe", "solar_open", "beam"),
    "cohere2_moe",
)
"""Families whose experts were linear layers before transformers 5, and which peft's all-linear still adapts
as such (peft/utils/transformers_weight_conversion.py, 0.21)."""
_IA3 = ("v_proj", "c_attn", "query_key_value", "down_proj", "mlp.c_proj", "dense_4h_to_h", "fc2")
"""What peft scales for IA3 besides queries or keys: values and an MLP's last matrix
(peft.utils.constants)."""


def adapted_names(
    shape: ModelShape,
    head: Matrix,
    targets: Literal["all-linear"] | Sequence[str],
    *,
    lora: bool,
    four_bit: bool,
) -> frozenset[str]:
    """The names of the matrices that have an adapter: LoRA, or else IA3. `head`: the model's, of logits or of
    scores; `four_bit`: whether a mixture's experts are stored in 4 bit. Raises InputError for a target that
    the model does not have."""
    found = [matrix for block in shape.blocks for matrix in matrices_of(shape, block)]
    if targets != "all-linear":  # a target is a module's name or the end of its path
        names = set[str]()
        for target in targets:
            matched = {m.name for m in (*found, head) if f".{m.name}".endswith(f".{target}")}
            if not matched:
                known = ", ".join(sorted({m.name.rpartition(".")[2] for m in found if m.linear}))
                raise InputError(f"lora_targets: {target} is no linear layer of the model; it has {known}.")
            names |= matched
        return frozenset(names)
    mixture = shape.family in _EXPERTS_ONCE_LINEAR
    bare = ("router", *(() if four_bit else ("expert up", "expert down"))) if mixture else ()
    linear = [m for m in found if m.linear or m.role in bare]
    also = "k_proj" if shape.family in ("llama", "mistral") else "q_proj"
    return frozenset(m.name for m in linear if lora or m.name.endswith((*_IA3, also)))


def lora_parts(shape: ModelShape, matrix: Matrix, rank: int, *, lengths: bool) -> list[Matrix]:
    """LoRA's matrices for `matrix`: A of rank x inputs and B of outputs x rank (arXiv 2106.09685), a pair for
    each expert, and for each of two fused matrices. `lengths`: with DoRA's (arXiv 2402.09353)."""
    rank *= matrix.stacked * (2 if matrix.role == "expert up" and shape.gated else 1)
    parts = [Matrix(f"{matrix.name}.lora_A", matrix.inputs, rank, "low")]
    parts.append(Matrix(f"{matrix.name}.lora_B", rank, matrix.outputs, "low"))
    of_rows = Matrix(f"{matrix.name}.lora_magnitude_vector", 1, matrix.outputs, "vector")
    return [*parts, of_rows] if lengths else parts


def ia3_parts(matrix: Matrix, *, listed: bool) -> list[Matrix]:
    """IA3's scale for each output of `matrix`, or for each input of an MLP's last matrix, unless targets are
    `listed` (arXiv 2205.05638)."""
    feeds = matrix.role == "down" and not listed
    return [Matrix(f"{matrix.name}.ia3", 1, matrix.inputs if feeds else matrix.outputs, "low")]
