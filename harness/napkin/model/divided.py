"""What tensor parallelism leaves of a model on one rank. No torch.

A layer's role decides, as in transformers' plan for the family (harness/parallel/layers.py runs it): what
makes heads or the MLP's width is divided by outputs (colwise), what reads them by inputs (rowwise), and
embeddings and head by words. Norms are whole, and so is the matrix of a LoRA pair on the side that is not
divided. Where a size does not divide, the first rank's part is the larger one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from harness.architecture import ModelShape
from harness.errors import InputError
from harness.napkin.model.layers import Matrix, attention_matrices, mlp_matrices

Style = Literal["colwise", "rowwise", "colwise_gather_output"]
"""How a linear layer is divided, in transformers' words; of the last, every rank gets all outputs."""
DIVIDED = ("gemma", "gemma2", "gpt_neox", "llama", "mistral", "phi", "qwen2")
"""The families with a plan that is built here."""
EMBEDDINGS_WHOLE = ("gpt_neox",)
"""Of those, the ones whose plan leaves the embeddings out."""


def shape_of_rank(whole: ModelShape, ranks: int) -> ModelShape:
    """The model as one of `ranks` computes it: its heads, its share of the MLP's width. The vocabulary stays
    whole, as logits and labels are.

    Raises InputError for a family without a plan, and for heads that do not divide.
    """
    if ranks == 1:
        return whole
    if whole.family not in DIVIDED:
        raise InputError(
            f"parallel: tp: no plan divides the layers of {whole.family} here; there is one for "
            f"{', '.join(DIVIDED)}. Set parallel: fsdp."
        )
    for count, heads in ((whole.heads, "query heads"), (whole.kv_heads, "key-value heads")):
        if count % ranks:
            raise InputError(f"tp: {ranks} does not divide the {count} {heads} of the model. Give a divisor.")
    return replace(
        whole,
        heads=whole.heads // ranks,
        kv_heads=whole.kv_heads // ranks,
        intermediate=largest_part(whole.intermediate, ranks),
    )


def largest_part(size: int, ranks: int) -> int:
    """Of a dimension: torch.chunk's, rounded up."""
    return -(-size // ranks)


def style_of(matrix: Matrix, shape: ModelShape) -> Style:
    """How the plan divides a linear layer of a block, or the head."""
    if matrix.name == "lm_head":
        return "colwise_gather_output"
    readers = (attention_matrices(shape)[-1].name, mlp_matrices(shape)[-1].name)
    return "rowwise" if matrix.name in readers else "colwise"
