"""Kernels that Python launches by Triton, as operators: each touches every one of its tensors once. One that
it reads and writes counts once, too.

A simulation calls the operators in place of a launch, and on the virtual GPU a launch happens within one
(virtual_gpu/startup/virtual_gpu_triton.py).
"""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from harness.kernels.operators import declare

_LIBRARY = torch.library.Library("harness", "FRAGMENT")
_OF_ATTENTION = "Tensor query, Tensor key, Tensor value, Tensor[] others, int seen"
"""Shapes are (batch, heads, length, head_dim). `seen`: the length of a causal sequence of which as many
blocks of scores are computed. Of the blocks that a mask leaves out nothing is."""
for _name, _touched in {
    "triton_kernel": "Tensor[] touched",
    "unknown_triton_kernel": "Tensor[] touched",
    "flex_attention": _OF_ATTENTION,
    "flex_attention_backward": _OF_ATTENTION,
}.items():
    _LIBRARY.define(f"{_name}({_touched}, str name) -> ()")
    _LIBRARY.impl(_name, lambda *_: None, "CompositeExplicitAutograd")

# Of Liger and of torch.compile, whose kernels wait for memory. What others compute (products among them)
# nobody has looked at: that operator is not declared.
declare(
    "harness::triton_kernel harness::flex_attention harness::flex_attention_backward",
    nothing="Python makes what it writes into",
)


@register_flop_formula(torch.ops.harness.flex_attention)
def _flops(query: Any, key: Any, value: Any, others: Any, seen: int, *_: Any, **__: Any) -> int:
    """FLOPs as torch counts them for its other kernels, which is of the whole square of scores."""
    return sdpa_flop_count(query, *_with_heads_of(query, seen, key, value))


@register_flop_formula(torch.ops.harness.flex_attention_backward)
def _backward_flops(query: Any, key: Any, value: Any, others: Any, seen: int, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count((*query[:3], value[3]), query, *_with_heads_of(query, seen, key, value))


def _with_heads_of(query: Any, seen: int, *grouped: Any) -> list[tuple[int, ...]]:
    return [(*query[:2], seen, shape[3]) for shape in grouped]
