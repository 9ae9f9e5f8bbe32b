"""`attention: flex_attention` on shape-only tensors: PyTorch's attention that torch.compile makes kernels of.
Nothing is compiled here.

What the compiled functions take from the allocator is what Inductor's code for them asks for, in its order
(torch/_inductor/kernel/flex/flex_attention.py, and of the mask torch/nn/attention/flex_attention.py,
_create_sparse_block_from_block_mask): neither scores nor a mask of tokens, but lists of blocks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from harness.errors import InputError
from harness.kernel_time import causal_length
from harness.system import Replacement, replaced
from harness.units import ceil_div

BLOCK = 128
"""The rows, and the keys, of a block of scores (_DEFAULT_SPARSE_BLOCK_SIZE)."""
SMALLEST_VARIANT = 128
"""The most elements for which Inductor's variants of a simple kernel are one and the same
(torch/_inductor/runtime/triton_heuristics.py, pointwise)."""


class _Function(torch.autograd.Function):
    """The compiled forward and backward. Tensors are (batch, heads, length, head_dim)."""

    clear_saved_tensors_on_access = boxed_grads_call = True  # as of compiled functions, which free them early

    @staticmethod
    def forward(
        ctx: Any, compiled: "_Compiled", mask: Any, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.compiled, ctx.dtype, ctx.seen = compiled, query.dtype, mask.seen
        query, key = query.to(value.dtype), key.to(value.dtype)  # what autocast does
        sums, scaled, out = made = _made(query, key, value)
        torch.ops.harness.flex_attention(query, key, value, made, mask.seen, "attention")
        compiled.measure("forward")
        torch.ops.harness.triton_kernel([sums, scaled], "scale")  # from logarithms of base 2 to natural ones
        ctx.save_for_backward(out, sums, *_inputs(query, key, value, mask))
        return out, scaled

    @staticmethod
    def backward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        out, sums, *inputs = ctx.saved_tensors
        # a PyTorch that knows no boxed_grads_call gives gradients one by one, and keeps them until the end
        grads = given[0] if isinstance(given[0], list) else [*given]
        grad, grad_of_sums = grads
        grads.clear()
        delta = torch.empty_like(sums)
        ctx.compiled.measure("backward", delta)
        torch.ops.harness.triton_kernel([delta, out, grad, grad_of_sums], "delta")
        del out, grad_of_sums
        query, key, value = inputs[:3]
        made = [torch.empty_like(each) for each in (query, value, key)]
        others = [grad, sums, delta, *made]
        torch.ops.harness.flex_attention_backward(query, key, value, others, ctx.seen, "attention's backward")
        query_grad, value_grad, key_grad = made
        del delta, sums, made, others, query, key, value
        for n in sorted(range(len(inputs)), key=lambda n: str(n + 1)):  # as the compiled code names them
            inputs[n] = None
        del grad
        if query_grad.dtype != ctx.dtype:
            query_grad, narrow = query_grad.to(ctx.dtype), key_grad
            key_grad = narrow.to(ctx.dtype)
            ctx.compiled.measure("cast of a gradient")
            del narrow
        return None, None, query_grad, key_grad, value_grad


class _Compiled:
    """What stays of compiling: PyTorch keeps the tensors of a function's first call. And Inductor chooses
    among variants of the small kernel beside attention's by measuring each of them, once a process. What it
    writes before each, so that the L2 cache has nothing of it, is as large as the cache
    (torch/_inductor/runtime/benchmarking.py, benchmark_gpu), beside a copy of what the kernel writes over.
    """

    def __init__(self, l2_bytes: int) -> None:
        self.l2_bytes = l2_bytes
        self.first_calls = dict[Any, Any]()
        self._measured = set[str]()

    def measure(self, kernel: str, copied: Tensor | None = None) -> None:
        if kernel not in self._measured:
            self._measured.add(kernel)
            flushed = torch.empty(self.l2_bytes // 4, dtype=torch.int32, device="meta")
            copy = None if copied is None else torch.clone(copied)
            del flushed, copy


def _inputs(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> list[Tensor | None]:
    """What the compiled function is given, in its order: tensors of the mask's function, as the documents of
    packed rows, each with its length, stand among the lists of blocks."""
    counts, blocks, *others = (each for each in mask.as_tuple() if isinstance(each, Tensor))
    documents = [
        given for each in _given(mask.mask_mod) if isinstance(each, Tensor) for given in (each, None)
    ]
    return [query, key, value, blocks, counts, *documents, *others]


def _given(mask_mod: Any) -> Iterator[Any]:
    """What the compiler tells functions of masks apart by: their code, and what they were made with."""
    return (value for _, value in _closed_over(mask_mod))


def _closed_over(mask_mod: Any) -> Iterator[tuple[str, Any]]:
    """The code of a mask's function ("") and what it closes over, by its names there, and so on of each
    function among them."""
    code = getattr(mask_mod, "__code__", None)
    yield "", code or type(mask_mod)
    cells = getattr(mask_mod, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=True):
        held = cell.cell_contents
        for each in held if isinstance(held, tuple | list) else [held]:
            yield from _closed_over(each) if callable(each) else [(name, each)]


def _made(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp of the scores, room for the same in another base, and the output, which lies in memory as
    the query does."""
    sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    like = query if query.shape[-1] == value.shape[-1] else query.new_empty(*query.shape[:3], value.shape[-1])
    return sums, torch.empty_like(sums), torch.empty_like(like)


def flex_replacements(packs: bool, document_tokens: float, l2_bytes: int) -> Iterator[Replacement]:
    """The functions of transformers that have attention and its mask compiled, without the compiler.

    `packs`: whether several documents share a row; `document_tokens`: how long that of a token is, in the
    mean."""
    from torch.nn.attention.flex_attention import AuxOutput

    compiled = _Compiled(l2_bytes)

    def attention(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **_: Any) -> Any:
        if block_mask is None:
            raise InputError(
                "attention: flex_attention: this model adds a mask of tokens to its scores, and nobody has "
                "looked at the kernel for it. Set attention: eager."
            )
        kind = tuple(each for each in _given(block_mask.mask_mod) if not isinstance(each, Tensor))
        compiled.first_calls.setdefault(kind, (query, key, value, block_mask))
        out, sums = _Function.apply(compiled, block_mask, query, key, value)
        return out, AuxOutput(lse=sums)

    why = "is compiled to kernels"
    place = "transformers.integrations.flex_attention.compile_friendly_flex_attention"
    yield Replacement(place, attention, why)
    block_mask = partial(_block_mask, compiled, document_tokens)
    yield Replacement("transformers.masking_utils.create_block_mask", block_mask, why)
    if packs:
        name = "transformers.masking_utils.find_packed_sequence_indices"
        yield Replacement(name, _found(resolve_name(name)), "asks whether positions begin anew: they do")


def _found(asks: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """transformers' function that finds documents by their positions, where there are several in a row."""
    reads = Tensor.__bool__

    def found(position_ids: Tensor) -> Tensor | None:
        with replaced(Tensor, "__bool__", lambda value: reads(value) and False):
            return asks(position_ids)

    return found


def _block_mask(
    compiled: _Compiled,
    document_tokens: float,
    mask_mod: Any,
    B: int,
    H: None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any,
    **_: Any,
) -> Any:
    """The lists of blocks that hold a score: for each row of blocks which ones, partly and wholly, and the
    same for each column. Every head has the same."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = ceil_div(Q_LEN, BLOCK), ceil_div(KV_LEN, BLOCK)

    def empty(*shape: int) -> Tensor:
        return torch.empty(B, 1, *shape, dtype=torch.int32, device=device)

    scattered = [empty(rows, columns + 1)]  # of partial blocks, and of whole ones
    if scattered[0].numel() > SMALLEST_VARIANT:
        compiled.measure("mask")
    scattered.append(empty(rows, columns + 1))
    by_row = [empty(rows, columns) for _ in range(2)]
    torch.ops.harness.triton_kernel([*by_row, *scattered], "scatter")
    of_rows, of_columns = list[Tensor](), list[Tensor]()
    for blocks in by_row:
        indices = _sorted(blocks)
        counts, turned = empty(rows), empty(rows, columns)
        torch.ops.harness.triton_kernel([indices, blocks, counts, turned], "fill")
        del indices
        of_rows += [counts, blocks]
        counts = empty(columns)
        torch.ops.harness.triton_kernel([scattered.pop(), counts], "count")
        torch.ops.harness.triton_kernel([_sorted(turned.mT), turned], "copy")
        of_columns += [counts, turned.view(B, 1, columns, rows)]
    made = BlockMask((Q_LEN, KV_LEN), *of_rows, *of_columns, (BLOCK, BLOCK), mask_mod)  # type: ignore[arg-type]
    made.seen = seen_blocks(KV_LEN, document_tokens, *_widths(mask_mod))  # type: ignore[attr-defined]
    return made


def seen_blocks(length: int, document_tokens: float, window: int | None, chunk: int | None) -> int:
    """The length of a causal sequence with as many blocks of scores as a mask leaves of `length` tokens.

    A row of blocks computes its own block and, rounded up to whole ones, what of its document lies before it:
    in the mean half of the document and one and a half blocks. A row of a causal sequence computes half of
    the sequence and half a block. A chunk of tokens consists of whole blocks.
    """
    return round(causal_length(min(length, document_tokens + 2 * BLOCK, chunk or length), window))


def _widths(mask_mod: Any) -> tuple[int | None, int | None]:
    """The tokens of a mask's window, and of its chunks, None without: transformers' functions close over them
    (masking_utils.py, sliding_window_overlay and chunked_overlay)."""
    found = dict[str, int]()
    for name, held in _closed_over(mask_mod):
        if name in ("sliding_window", "chunk_size"):
            found[name] = held
    return found.get("sliding_window"), found.get("chunk_size")


def _sorted(blocks: Tensor) -> Tensor:
    """Where each block of a row stands when those that hold a score come first."""
    values, indices = torch.sort(blocks, stable=True, descending=True)
    del values
    return indices
