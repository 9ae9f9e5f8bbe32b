"""The kernels of the flash-attn packages on shape-only tensors: `attention: flash_attention_2` to `_4`.

The packages are not part of torch and need not be installed. Their functions are written again here around
operators of our own, which have the same outputs and saved tensors. What a kernel takes from the allocator
while it runs is a script, as for torch's own. Sources, in github.com/Dao-AILab/flash-attention: version 2
(2.8), flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp; version 3,
hopper/flash_attn_interface.py and hopper/flash_api.cpp; version 4 (0251105), flash_attn/cute/interface.py.
"""

from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from harness.kernel_time import causal_length
from harness.simulate.cuda.attention_call import padded
from harness.system import Replacement, nothing

UTILS = "modeling_flash_attention_utils"
_OPERATORS = torch.library.Library("harness", "FRAGMENT")
_OPERATORS.define(
    "flash_attention(Tensor query, Tensor key, Tensor value, Tensor? starts, int longest, int seen, "
    "float dropout_p, bool causal, bool local, int version) -> (Tensor, Tensor, Tensor)"
)
_OPERATORS.define(
    "flash_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor sums, "
    "Tensor(a!) query_grad, Tensor(b!) key_grad, Tensor(c!) value_grad, Tensor? starts, int longest, "
    "int seen, bool causal, bool local, bool capped, bool deterministic, int version) -> ()"
)
_operators = torch.ops.harness


class FlashAttention(NamedTuple):
    """The functions of a flash-attn package that transformers calls."""

    func: Callable[..., Tensor]
    """flash_attn_func(q, k, v, ...): (batch, length, heads, head_dim)."""
    varlen_func: Callable[..., Tensor]
    """flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, ...): (tokens, heads, head_dim)."""


class _How(NamedTuple):
    """The settings of one call of attention."""

    starts: Tensor | None
    """Where each document starts among the tokens laid end to end, and the last one ends; None for rows."""
    longest: int
    """The number of keys of the longest document."""
    seen: int
    """The length of a causal sequence whose tokens see as many keys, in the mean: what the time follows."""
    dropout_p: float
    causal: bool
    local: bool
    """Whether there is a sliding window."""
    capped: bool
    """Whether the scores have a soft cap."""
    deterministic: bool
    version: int


def flash_attention(version: int, document_tokens: float | None = None) -> FlashAttention:
    """The functions of flash-attn `version` 2, 3 or 4 (the latter have no dropout), on shape-only tensors.

    `document_tokens`: how long the document of a token is, in the mean, where documents lie end to end; None:
    as long as the longest."""

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
        learnable_sink: Tensor | None = None,  # version 4's; models that have one take no other version
    ) -> Tensor:
        # a window over all keys is none (flash_api.cpp, mha_fwd)
        local = 0 <= window_size[0] < max_seqlen_k - 1
        length = max_seqlen_k if cu_seqlens_q is None else document_tokens or max_seqlen_k
        seen = round(causal_length(length, window_size[0] + 1 if local else None))
        settings = seen, dropout_p, causal, local, softcap > 0, deterministic, version
        return _Function.apply(q, k, v, _How(cu_seqlens_q, max_seqlen_k, *settings), learnable_sink)

    def dense(q: Tensor, k: Tensor, v: Tensor, *settings: Any, **named: Any) -> Tensor:
        return varlen(q, k, v, None, None, q.shape[1], k.shape[1], *settings, **named)

    return FlashAttention(dense, varlen)


class _Function(torch.autograd.Function):
    """FlashAttnFunc and FlashAttnVarlenFunc. Version 2 pads head dims to multiples of 8, and saves a seed."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: _How, sink: Tensor | None) -> Tensor:
        ctx.head_dim, ctx.how = q.shape[-1], how
        if how.version == 2:
            q, k, v = (padded(t) for t in (q, k, v))
        out, sums, random_state = _operators.flash_attention(
            *(q, k, v, how.starts, how.longest, how.seen, how.dropout_p),
            *(how.causal, how.local, how.version),
        )
        kept = (random_state,) if how.version == 2 else ()
        ctx.save_for_backward(q, k, v, out, sums, how.starts, sink, *kept)
        return out[..., : ctx.head_dim]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, starts, sink, *_ = ctx.saved_tensors
        how = ctx.how
        made = [torch.empty_like(t) for t in (q, k, v)]
        grad = padded(grads[0]) if how.version == 2 else grads[0]
        _operators.flash_attention_backward(
            *(grad, q, k, v, out, sums, *made, starts, how.longest, how.seen),
            *(how.causal, how.local, how.capped, how.deterministic, how.version),
        )
        sink_grad = None if sink is None else torch.empty_like(sink)
        return *(t[..., : ctx.head_dim] for t in made), None, sink_grad


def _made(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    longest: int,
    seen: int,
    dropout_p: float,
    causal: bool,
    local: bool,
    version: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the log-sum-exp of the scores, and (version 2) seed and offset of the random numbers."""
    heads = query.shape[-2]
    shape = (query.shape[0], heads, query.shape[1]) if starts is None else (heads, query.shape[0])
    sums = query.new_empty(shape, dtype=torch.float32)
    random_state = query.new_empty(2 if version == 2 else 0, dtype=torch.int64)
    return query.new_empty((*query.shape[:-1], value.shape[-1])), sums, random_state


_OPERATORS.impl("flash_attention", _made, "Meta")
_OPERATORS.impl("flash_attention_backward", nothing, "Meta")  # the gradients are there already


@register_flop_formula(_operators.flash_attention)
def _flops(query: Any, key: Any, value: Any, starts: Any, longest: int, seen: int, *_: Any, **__: Any) -> int:
    """FLOPs as torch counts them for its own kernel, of a sequence in which tokens see as many keys: where a
    window or a document ends, the kernel leaves out the others."""
    return sdpa_flop_count(*_as_batch(query, key, value, seen))


@register_flop_formula(_operators.flash_attention_backward)
def _backward_flops(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, *rest: Any, **__: Any
) -> int:
    *_, seen = rest[:6]  # after the gradients, `starts` and `longest`
    q, k, v = _as_batch(query, key, value, seen)
    return sdpa_backward_flop_count((*q[:-1], grad[-1]), q, k, v)


def _as_batch(query: Any, key: Any, value: Any, seen: int) -> list[tuple[int, ...]]:
    """The shape (batch, heads, length, head_dim) of query, key and value, all with the query's heads."""
    lead = (1,) if len(query) == 3 else query[:1]
    heads = query[-2]
    return [(*lead, heads, query[-3], query[-1]), *((*lead, heads, seen, t[-1]) for t in (key, value))]


class _NotPacked:
    """What transformers is told of one row's position ids: False when it asks, for which the host waits until
    the value is there. Rows of several documents are marked (training/document_masks.py)."""

    def __init__(self, found: Tensor) -> None:
        self._found = found

    def __bool__(self) -> bool:
        bool(self._found)
        return False


def flash_replacements(version: int, document_tokens: float) -> Iterator[Replacement]:
    """The functions of transformers that look for the package, answering as if it were installed."""
    package = flash_attention(version, document_tokens)
    asks_values: Any = resolve_name(f"transformers.{UTILS}:_is_packed_sequence")

    def is_packed_sequence(*given: Any, **named: Any) -> bool | _NotPacked:
        found = asks_values(*given, **named)
        return _NotPacked(found) if isinstance(found, Tensor) else False

    for name, value, why in (
        ("modeling_utils.PreTrainedModel._flash_attn_can_dispatch", lambda *_, **__: True, "asks for a GPU"),
        ("modeling_utils.is_kernels_available", lambda *_, **__: False, "would fetch kernels from the Hub"),
        (f"{UTILS}._lazy_imports", lambda *_, **__: (*package, None, None, None), "imports the package"),
        (f"{UTILS}._loaded_implementation", None, "keeps what it has imported"),
        (f"{UTILS}._is_packed_sequence", is_packed_sequence, "reads values back"),
    ):
        yield Replacement(f"transformers.{name}", value, why)
