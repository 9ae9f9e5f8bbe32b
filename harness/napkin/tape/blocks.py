"""Each family's transformer block, embedding and head, written as operators on a tape.

What the letters of dims stand for is in napkin/tape/dims.py. Follows transformers 5.23,
models/*/modeling_*.py.
"""

from __future__ import annotations

from harness.napkin.dtypes import SIZES
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.layers import Matrix, attention_matrices, mlp_matrices
from harness.napkin.tape.attention import attention
from harness.napkin.tape.collectives import summed_over_ranks
from harness.napkin.tape.dims import DIMS
from harness.napkin.tape.experts import experts
from harness.napkin.tape.linear import linear
from harness.napkin.tape.ops import activate, add, dropout, multiply, norm, rotate, scale
from harness.napkin.tape.tape import Tape, Tensor


def new_tape(built: BuiltModel, gpu_threads: int) -> Tape:
    """An empty tape for this model and recipe, one micro batch, on a GPU that holds so many threads."""
    sizes = {letter: dim.size(built) for letter, dim in DIMS.items()}
    caches = not built.recipe.parameters_on_host
    hooked = built.recipe.activations_on_host
    compiled = built.recipe.compile
    return Tape(
        sizes, built.autocast, gpu_threads, hooked, caches_casts=caches, compiled=compiled, ranks=built.tp
    )


def embed(tape: Tape, built: BuiltModel) -> Tensor:
    """Token embeddings (and GPT-2's positions): B S H, in the embeddings' dtype."""
    shape, dtype, trained = built.shape, built.loose_dtype, built.trains_base
    ids = tape.tensor("input_ids", "B S", "int64")
    gradient = built.embedding_gradient_elements * SIZES[dtype] if trained else 0
    x = tape.product("embeddings", "B S H", dtype, [ids], [], flops=0, weight_gradient_bytes=gradient)
    if built.embedding.outputs < shape.vocab:
        x = summed_over_ranks(tape, x)
    if shape.family in ("gemma", "gemma2"):
        x = scale(tape, x, "embeddings scaled")
    if shape.positions:
        table = Matrix("position_embeddings", shape.hidden, shape.positions)
        gradient = table.elements * SIZES[dtype] if trained else 0
        positions = tape.tensor("positions", "S", "int64")
        where = tape.product(
            "position embeddings", "S H", dtype, [ids], [positions], flops=0, weight_gradient_bytes=gradient
        )
        x = tape.op(
            "embeddings + positions", "B S H", dtype, [x, where], passes_gradient=True, recomputable=False
        )
    return dropout(tape, x, shape.embedding_dropout)


def rotary_tables(tape: Tape, positions: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of all `positions` (dims), in the dtype of the embeddings; shared by all layers."""
    return tape.tensor("cos", f"{positions} O", x.dtype), tape.tensor("sin", f"{positions} O", x.dtype)


def block(
    tape: Tape,
    built: BuiltModel,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    mask: Tensor | None,
    compute_capability: float,
) -> Tensor:
    """One transformer block on the residual stream x (B S H)."""
    shape = built.shape
    normed = norm(tape, built, x, "norm 1")
    q, k, v = _heads(tape, built, normed, tables)
    mixed = attention(tape, built, q, k, v, mask, compute_capability)
    out_matrix = attention_matrices(shape)[-1]
    mixed = linear(tape, built, mixed, out_matrix, "attention out", "B S H")
    tape.hold(normed)
    if shape.family == "gemma2":
        mixed = norm(tape, built, mixed, "norm 2")
    mixed = dropout(tape, mixed, shape.residual_dropout)
    if shape.parallel_residual:
        second = normed if shape.family == "phi" else norm(tape, built, x, "norm 2")
        fed = dropout(tape, mlp(tape, built, second), shape.residual_dropout)
        return add(tape, add(tape, fed, mixed, "mlp + attention"), x, "residual 2")
    x = add(tape, x, mixed, "residual 1")
    normed = norm(tape, built, x, "norm 3" if shape.family == "gemma2" else "norm 2")
    fed = experts(tape, built, normed) if shape.experts else mlp(tape, built, normed)
    tape.hold(normed)
    if shape.family == "gemma2":
        fed = norm(tape, built, fed, "norm 4")
    return add(tape, x, dropout(tape, fed, shape.residual_dropout), "residual 2")


def _heads(
    tape: Tape, built: BuiltModel, x: Tensor, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B S N D), keys and values (B S G D), rotated where the family rotates."""
    shape = built.shape
    matrices = attention_matrices(shape)
    if len(matrices) == 2:
        packed = linear(tape, built, x, matrices[0], "qkv", "B S W")
        parts = [("q", "B S N D"), ("k", "B S G D"), ("v", "B S G D")]
        if shape.family == "phi3":
            q, k, v = (tape.slice(packed, name, dims) for name, dims in parts)
        else:
            q, k, v = tape.split(packed, parts)
    else:
        q = linear(tape, built, x, matrices[0], "q", "B S N D")
        k = linear(tape, built, x, matrices[1], "k", "B S G D")
        v = linear(tape, built, x, matrices[2], "v", "B S G D")
    if shape.family == "qwen3":
        q, k = norm(tape, built, q, "q norm"), norm(tape, built, k, "k norm")
    if shape.rotary_dim:
        q, k = rotate(tape, built, q, tables, "q"), rotate(tape, built, k, tables, "k")
    return q, k, v


def mlp(tape: Tape, built: BuiltModel, x: Tensor) -> Tensor:
    """The block's feed-forward part: two matrices, or three with a gate."""
    shape, matrices = built.shape, mlp_matrices(built.shape)
    if shape.family == "phi3":
        packed = linear(tape, built, x, matrices[0], "gate and up", "B S J")
        gate, up = tape.split(packed, [("gate", "B S I"), ("up", "B S I")])
        inner = multiply(tape, up, activate(tape, built, gate, "activation"), "gated")
    elif len(matrices) == 2:
        up = linear(tape, built, x, matrices[0], "up", "B S I")
        inner = activate(tape, built, up, "activation")
    else:
        gate = linear(tape, built, x, matrices[0], "gate", "B S I")
        active = activate(tape, built, gate, "activation")
        up = linear(tape, built, x, matrices[1], "up", "B S I")
        inner = multiply(tape, active, up, "gated")
    return linear(tape, built, inner, matrices[-1], "mlp out", "B S H")
