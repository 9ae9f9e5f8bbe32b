"""What a recipe makes of a model: the dtype, storage and trainability of every weight. No torch.

The facts follow harness/training/model.py: dtypes by precision, bitsandbytes for every linear layer but the
output head (and for stacked experts), peft's adapters, and its preparation for k-bit training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from harness.architecture import ModelShape
from harness.errors import InputError
from harness.napkin.model.divided import EMBEDDINGS_WHOLE, Style, largest_part, shape_of_rank, style_of
from harness.napkin.model.layers import (
    Matrix,
    attention_matrices,
    embedding_matrix,
    expert_matrices,
    head_matrix,
    mlp_matrices,
    router_matrix,
)
from harness.recipe import Recipe

# peft.utils.constants, TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING and ..._FEEDFORWARD_...
_IA3_TARGETS = {
    **dict.fromkeys(("llama", "mistral"), ("k_proj", "v_proj", "down_proj")),
    "mixtral": ("k_proj", "v_proj", "w2"),  # w2 is gone since transformers 5: peft's choice cannot be built
    **dict.fromkeys(("qwen2", "qwen3", "gemma", "gemma2"), ("q_proj", "v_proj", "down_proj")),
    "phi": ("q_proj", "v_proj", "fc2"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
}
_IA3_FEEDFORWARD = ("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h")

AdapterKind = Literal["lora", "lora_parameter", "ia3", "ia3_feedforward"]
"""lora_parameter: on a bare parameter, as a mixture's router and experts are."""


@dataclass(frozen=True)
class BuiltModel:
    """A model shape under a recipe."""

    recipe: Recipe
    whole: ModelShape
    """The model's, before tensor parallelism divides it."""

    @cached_property
    def shape(self) -> ModelShape:
        """The model as a rank computes it. Raises InputError for one that cannot be divided."""
        return shape_of_rank(self.whole, self.tp)

    @property
    def tp(self) -> int:
        """Ranks that share every layer (tensor parallelism)."""
        return self.recipe.tp

    @cached_property
    def embedding(self) -> Matrix:
        """The token embeddings that a rank holds."""
        words = 1 if self.shape.family in EMBEDDINGS_WHOLE else self.tp
        return embedding_matrix(self.shape, largest_part(self.shape.vocab, words))

    @property
    def embedding_gradient_elements(self) -> int:
        """Of the embeddings' gradient as backward makes it: of all words, whatever part of them a rank has.

        DTensor knows no division of it by words (torch/distributed/tensor/_ops/_embedding_ops.py, 2.13).
        """
        return embedding_matrix(self.shape, self.shape.vocab).elements

    @cached_property
    def head(self) -> Matrix:
        """The output head that a rank holds."""
        return head_matrix(self.shape, self.words)

    @property
    def words(self) -> int:
        """Of the vocabulary, those that a rank's head scores."""
        return largest_part(self.shape.vocab, self.tp)

    def divided(self, matrix: Matrix) -> Style | None:
        """How a linear layer is divided among the ranks of a layer; None without tensor parallelism."""
        return style_of(matrix, self.shape) if self.tp > 1 else None

    @property
    def trains_base(self) -> bool:
        """Whether the model's own weights are trained."""
        return self.recipe.trains_base

    @property
    def made_dtype(self) -> str:
        """The dtype the model's weights are made in, before quantization and k-bit preparation.

        Plain precisions: that dtype. Under autocast: fp32, but a frozen base as its config declares it.
        """
        if not self.recipe.mixed:
            return self.recipe.precision
        return "fp32" if self.trains_base else self.shape.dtype or "fp32"

    @property
    def loose_dtype(self) -> str:
        """The dtype of weights that are not quantized: k-bit preparation makes them all fp32."""
        return "fp32" if self.recipe.upcast_for_kbit else self.made_dtype

    def linear_dtype(self, matrix: Matrix) -> str:
        """The dtype in which a linear layer's unquantized weight is on the device. When the model lives in
        host memory it is cast as it arrives, but for a head that is tied (toggles/offload_parameters.py)."""
        tied = self.shape.tied and matrix == self.head
        arrives_cast = self.recipe.parameters_on_host and self.loose_dtype == "fp32" and not tied
        return self.autocast or "fp32" if arrives_cast else self.loose_dtype

    @property
    def autocast(self) -> str | None:
        """The dtype autocast runs matrix products in; None without autocast."""
        return self.recipe.compute_dtype if self.recipe.mixed else None

    def quantized(self, matrix: Matrix) -> str | None:
        """The format bitsandbytes stores `matrix` in: nf4, fp4 or int8; None if it does not. Stacked experts
        are quantized to 4 bit only."""
        if self.recipe.quantization == "none" or matrix.name in ("lm_head", "embed_tokens"):
            return None
        return self.recipe.quantization if self.recipe.four_bit or not matrix.stacked else None

    @property
    def scales_quantized(self) -> bool:
        """Whether the scales of 4-bit blocks are quantized as well."""
        return self.recipe.double_quant

    @cached_property
    def adapted(self) -> dict[str, AdapterKind]:
        """The adapter on each layer that has one, by name. Raises InputError for a missing target."""
        recipe, family = self.recipe, self.shape.family
        if recipe.trains_base:
            return {}
        targets = recipe.lora_targets
        inside = [*attention_matrices(self.shape), *mlp_matrices(self.shape)]
        feedforward: tuple[str, ...] = ()
        if targets == "all-linear" and recipe.adapter == "ia3":
            if family not in _IA3_TARGETS:
                raise InputError(
                    f"adapter: ia3: peft has no choice of modules for {family}; set lora_targets to a list."
                )
            targets, feedforward = _IA3_TARGETS[family], _IA3_FEEDFORWARD
        if targets == "all-linear":
            return {**dict.fromkeys((m.name for m in inside), "lora"), **self._adapted_mixture()}
        candidates = [*inside, self.head]
        found: dict[str, AdapterKind] = {}
        for target in targets:
            matched = [m.name for m in candidates if _matches(m.name, (target,))]
            if not matched:
                names = ", ".join(m.name.rpartition(".")[2] for m in inside)
                raise InputError(
                    f"lora_targets: [{', '.join(targets)}]: {family} has no linear layer {target}; "
                    f"it has {names}."
                )
            kind = "lora" if recipe.adapter == "lora" else "ia3"
            if target in feedforward:
                kind = "ia3_feedforward"
            found |= dict.fromkeys(matched, kind)
        return found

    def _adapted_mixture(self) -> dict[str, AdapterKind]:
        """What peft 0.21 makes of all-linear in a mixture: what was linear before transformers 5."""
        if not self.shape.experts:
            return {}
        if self.recipe.lora_dropout:
            raise InputError(
                f"lora_dropout: {self.recipe.lora_dropout}: peft cannot drop inputs of a mixture's router "
                "and experts; set lora_dropout: 0, or lora_targets: [q_proj, k_proj, v_proj, o_proj]."
            )
        experts = (
            [] if self.recipe.four_bit else expert_matrices(self.shape)
        )  # hidden behind a parametrization
        bare = [router_matrix(self.shape), *experts]
        return {m.name: "lora_parameter" for m in bare}

    @property
    def adapter_rank(self) -> int:
        """LoRA's rank."""
        return self.recipe.lora_rank

    @property
    def adapter_dropout(self) -> float:
        """The probability that an input of LoRA's A is dropped."""
        return self.recipe.lora_dropout

    def adapter_ranks(self, matrix: Matrix) -> int:
        """Columns of LoRA's A: the rank, for each expert apart, and for each matrix that is fused with it."""
        return self.adapter_rank * matrix.parts * matrix.fused

    def adapter_dtype(self, matrix: Matrix) -> str:
        """The dtype of the adapter weights on `matrix`.

        peft makes them fp32, or casts them to the base's dtype, for which it takes the compute dtype of a
        4-bit layer; it finds no floating dtype in an int8 one (tuners_utils.py).
        """
        if self.recipe.adapter_dtype == "fp32":
            return "fp32"
        if not self.quantized(matrix):
            return self.loose_dtype
        return self.recipe.compute_dtype if self.recipe.four_bit else "fp32"

    def block_matrices(self) -> list[Matrix]:
        """Linear layers and stacked experts of one block."""
        return [*attention_matrices(self.shape), *mlp_matrices(self.shape), *expert_matrices(self.shape)]


def _matches(name: str, targets: tuple[str, ...]) -> bool:
    """peft's rule: a target is a module's name or the end of its path."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
