"""Counts FLOPs of the operators that run, by phase, with torch.utils.flop_counter's formulas and our own."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from harness.kernel_time import causal_length
from harness.observe.convolutions import Convolution

aten = torch.ops.aten
Formula = Callable[[Any, Any], int]


def operator_flops(func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """FLOPs (2 a multiply-add) of one call of an ATen or bitsandbytes operator; 0 for an elementwise one."""
    name = func._schema.name
    if name.startswith("flash_attn::"):
        return _flash_attn({**dict(zip(_names(func), args, strict=False)), **kwargs}, "backward" in name)
    ours = FORMULAS.get(name)
    if ours is not None:
        return int(ours(args, out))
    theirs = flop_registry.get(func._overloadpacket)
    return 0 if theirs is None else int(theirs(*args, **kwargs, out_val=out))


class FlopCount(TorchDispatchMode):
    """Adds up FLOPs by phase while active, and notes which attention operators ran.

    Recomputation is counted apart as well: in backward, autograd's own operators run without grad mode
    and a checkpointed block's second forward runs with it, which tells the two from each other.
    It can observe a run's steps by itself (loop.LoopObserver). Compiled code is invisible to a dispatch
    mode, so a compiled model has to run eager meanwhile: torch.compiler.set_stance("force_eager").
    """

    supports_higher_order_operators = True
    """Flex attention is one: an operator with a function among its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.current_phase = ""
        self.flops: dict[str, int] = defaultdict(int)
        self.recomputed_flops = 0
        self.attention: set[str] = set()
        """Names of the attention operators seen, as PyTorch has them; empty for attention: eager."""
        self._of_results = dict[int, int]()
        """FLOPs of flex attention, by where its result is."""

    def begin_step(self, index: int, kind: str) -> None:
        """See LoopObserver (training/loop.py)."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.current_phase = name
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        takes_functions = isinstance(func, HigherOrderOperator)
        if takes_functions and "flex_attention" in func.name():
            out, flops = self._flex_attention(func, args)
        else:
            out = func(*args, **(kwargs or {}))
            flops = 0 if takes_functions else operator_flops(func, args, kwargs or {}, out)
        if flops:
            self.flops[self.current_phase] += flops
            if self.current_phase == "backward" and torch.is_grad_enabled():
                self.recomputed_flops += flops
        name = str(getattr(func, "_overloadpacket", func))
        if self.current_phase == "forward" and _ATTENTION.search(name):
            self.attention.add(name)
        return out

    def _flex_attention(self, func: Any, args: Any) -> tuple[Any, int]:
        """Its results, and its FLOPs: in backward five products instead of two, of the forward that made the
        fourth argument."""
        made = _zeros_for(func, args)
        if func.name().endswith("backward"):
            return made, 5 * self._of_results.pop(args[3].data_ptr(), 0) // 2
        flops = self._of_results[made[0].data_ptr()] = _flex_flops(*args[:5])
        return made, flops


_ATTENTION = re.compile(r"scaled_dot_product|flash_attn|_safe_softmax|flex_attention")
"""PyTorch's fused kernels and flash-attn's own. SDPA's math path shows no operator of its own but
_safe_softmax, which nothing else in a model calls."""


def _names(func: Any) -> list[str]:
    return [argument.name for argument in func._schema.arguments]


def _flash_attn(given: dict[str, Any], backward: bool) -> int:
    """torch's count for its own kernels, of the flash-attn package's (flash_attn_interface.py). Tensors are
    (batch, length, heads, head_dim), or documents end to end, (tokens, heads, head_dim) with `cu_seqlens_k`:
    where each begins. Of a window, as of a causal sequence in which tokens see as many keys."""
    query, value = given["q"], given["v"]
    starts, left = given.get("cu_seqlens_k"), given.get("window_size_left", -1)
    lengths = [given["k"].shape[1]] * query.shape[0] if starts is None else starts.diff().tolist()
    scores = sum(length * causal_length(length, left + 1 if left >= 0 else None) for length in lengths)
    products = (3, 2) if backward else (1, 1)
    widths = products[0] * query.shape[-1] + products[1] * value.shape[-1]
    return int(2 * query.shape[-2] * scores * widths)


def _zeros_for(func: Any, args: Any) -> Any:
    """Zeros in place of what flex attention returns, of its shapes. Without torch.compile it would make all
    scores, which may not fit."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        made = func(*tree_map_only(Tensor, fake.from_tensor, args))
    return tree_map_only(
        Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_(),
        made,
    )


def _flex_flops(query: Tensor, key: Tensor, value: Tensor, _: Any, mask: tuple[Any, ...]) -> int:
    """torch's count for its other kernels, of a causal sequence of which as many blocks of scores are
    computed; of those that a mask leaves out nothing is. `mask` begins with both lengths and, for each row of
    blocks, how many of them are left in part, which ones, and how many as a whole."""
    _, keys, partly, which, wholly, *_ = mask
    in_a_row = sum(each.cpu().double().mean().item() for each in (partly, wholly) if each is not None)
    seen = round(-(-keys // which.shape[-1]) * (2 * in_a_row - 1))
    return sdpa_flop_count(query.shape, *((*query.shape[:2], seen, each.shape[3]) for each in (key, value)))


def _product(packet: Any, factors: int) -> Formula:
    """torch's count, from the factors alone: some overloads have the result's dtype as a last argument, which
    torch's formula does not accept.
    """
    return lambda args, out: flop_registry[packet](*args[:factors], out_val=out)


def _attention(args: Any, out: Any) -> int:
    """torch's count (2 products), none halved for a causal mask, with the key's and value's heads repeated to
    the query's, as the kernels do: torch 2.11 refuses to count fewer. Arguments begin with query, key, value.
    """
    return sdpa_flop_count(*_as_many_heads(args[:3]))


def _attention_backward(args: Any, out: Any) -> int:
    """The same with 5 products. The output's gradient comes first."""
    query, key, value = _as_many_heads(args[1:4])
    return sdpa_backward_flop_count((*query[:3], value[3]), query, key, value)


def _as_many_heads(tensors: Any) -> list[Any]:
    query, *others = (tensor.shape for tensor in tensors)
    return [query, *((*shape[:1], query[1], *shape[2:]) for shape in others)]


def _convolution(name: str, args: Any, out: Any) -> int:
    return Convolution.of(name, args, out).flops


def _int8_linear(args: Any, out: Any) -> int:
    (rows, inner), columns = args[0].reshape(-1, args[0].shape[-1]).shape, args[1].shape[0]
    return 2 * rows * inner * columns


def _grouped_mm(args: Any, out: Any) -> int:
    """Rows are grouped by expert: every row meets one (k, n) matrix, or two 2-D sides give (groups, m, n)."""
    left, right = args[0], args[1]
    if left.dim() == 2 and right.dim() == 2:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]
    return 2 * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _linear_4bit(args: Any, out: Any) -> int:
    """Arguments: the input, the packed weight, the weight's shape (out, in)."""
    return 2 * (args[0].numel() // args[0].shape[-1]) * args[2][0] * args[2][1]


_FUSED = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
FORMULAS: dict[str, Formula] = {
    "aten::mm": _product(aten.mm, 2),
    "aten::bmm": _product(aten.bmm, 2),
    **dict.fromkeys(("aten::addmm", "aten::addmm_"), _product(aten.addmm, 3)),
    "aten::baddbmm": _product(aten.baddbmm, 3),
    "aten::_scaled_mm": _product(aten.mm, 2),
    # torch's count has the gradient of a group's filter once for each group
    **{name: partial(_convolution, name) for name in ("aten::convolution", "aten::convolution_backward")},
    "aten::_grouped_mm": _grouped_mm,
    **{f"aten::_scaled_dot_product_{name}": _attention for name in _FUSED},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _FUSED},
    "transformers::grouped_mm_fallback": _grouped_mm,
    "transformers::grouped_mm_fallback_backward": lambda args, out: 2 * _grouped_mm(args, out),
    "bitsandbytes::int8_linear_matmul": _int8_linear,
    "bitsandbytes::int8_scaled_mm": _int8_linear,
    # the input, the same in int8, the weight in int8
    "bitsandbytes::int8_mixed_scaled_mm": lambda args, out: _int8_linear((args[0], args[2]), out),
    "bitsandbytes::gemm_4bit": _linear_4bit,
    "bitsandbytes::gemv_4bit": _linear_4bit,
}
"""Functions of (args, out) that give FLOPs, by the name in the operator's schema, for operators that torch's
registry lacks, or counts otherwise. What else an operator does on CUDA: kernels/operators.py, by the same
name."""
