"""Integers whose values decide about shapes when a GPU's program reads them back.

A vision model asks how many patches an image has, and which tokens belong to images; methods of peft, which
of the places that they chose are within a weight. So shape-only tensors of integers and bools carry their
values here, which the same operators compute on the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from harness.simulate.cuda.shape_cache import Call

aten = torch.ops.aten
MOST_BYTES = 2**24
"""Values of larger tensors are not kept. A mask of tokens by tokens can be larger; nobody reads it back."""
COUNTED = (
    *(aten.nonzero, aten.repeat_interleave, aten.masked_select, aten.unique_consecutive),
    *(aten._unique2, aten.unique_dim, aten.bincount),
)
"""Operators whose outputs have sizes that depend on values."""
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
"""Operators whose second argument is a list of indices, or of masks."""
Run = Callable[[Any, Any, Any], tuple[Any, Call]]


def with_values(func: Any, args: Any, kwargs: dict[str, Any], run: Run) -> tuple[Any, Call]:
    """Call `run` for the operator, and compute its results' values where those of its arguments are known."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    known = all(_values(tensor) is not None for tensor in given)
    packet = func._overloadpacket
    if known and given and _leaves_the_device(func, args, kwargs, given):
        return _computed(func, args, kwargs), Call()
    there = any(tensor.is_meta for tensor in given)
    if packet in COUNTED and there and (values := _counted(func, args, kwargs, known)) is not None:
        made = tree_map(lambda each: each.new_empty(each.shape, device="meta"), values)
        return _remembered(made, values if known else None), Call()
    out, call = run(func, _with_indices(packet, args), kwargs)
    if packet is aten.isinf and out.is_meta:  # nothing that a simulation has is infinite
        return remember(out, torch.zeros(out.shape, dtype=torch.bool)), call
    made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    if not any(tensor.is_meta for tensor in made) or all(tensor.dtype.is_floating_point for tensor in made):
        return out, call
    small = all(tensor.numel() * tensor.itemsize <= MOST_BYTES or _is_view(func) for tensor in made)
    if known and small and packet not in (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided):
        return _remembered(out, _computed(func, args, kwargs)), call
    for tensor in made:  # written in place, with what nobody knows
        if hasattr(tensor, "known_values"):
            del tensor.known_values  # type: ignore[attr-defined]
    return out, call


def remember(tensor: Tensor, values: Tensor) -> Tensor:
    """Attach `values` to `tensor`, if that is shape-only and of integers or bools, and return it."""
    if tensor.is_meta and not (values.dtype.is_floating_point or values.dtype.is_complex):
        tensor.known_values = values  # type: ignore[attr-defined]
    return tensor


def with_numbers(data: Any) -> Any:
    """`data`, an argument of torch.tensor, with numbers instead of tensors; None if one is unknown."""
    leaves = [leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)]
    if any(_values(leaf) is None for leaf in leaves):
        return None

    def number(leaf: Any) -> Any:
        values = _values(leaf) if isinstance(leaf, Tensor) else None
        return leaf if values is None else values.tolist()

    return tree_map(number, data)


def _values(tensor: Tensor) -> Tensor | None:
    """The values of a tensor as a tensor on the CPU; None where they are not known."""
    return getattr(tensor, "known_values", None) if tensor.is_meta else tensor


def _remembered(out: Any, values: Any) -> Any:
    """An operator's results with their values attached; `values` is None where they are not known."""
    if values is not None:
        for tensor, each in zip(tree_leaves(out), tree_leaves(values), strict=True):
            if isinstance(tensor, Tensor):
                remember(tensor, each)
    return out


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The results of the operator on the CPU, on the known values."""

    def on_cpu(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu") if leaf.type == "meta" else leaf
        return _values(leaf) if isinstance(leaf, Tensor) else leaf

    return func(*tree_map(on_cpu, args), **tree_map(on_cpu, kwargs))


def _leaves_the_device(func: Any, args: Any, kwargs: dict[str, Any], given: list[Tensor]) -> bool:
    """Whether the operator reads values of the device back to the host."""
    if not any(tensor.is_meta for tensor in given):
        return False
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu"
    return func is aten._local_scalar_dense.default or (func is aten.copy_.default and args[0].is_cpu)


def _counted(func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
    """The outputs with their real sizes, and with their values if those of all arguments are known; None
    where the sizes are not known."""
    if known:
        return _computed(func, args, kwargs)
    if func._overloadpacket is aten.masked_select and (mask := _values(args[1])) is not None:
        return args[0].new_empty(int(mask.expand(args[0].shape).sum()), device="meta")
    return None


def _with_indices(packet: Any, args: Any) -> tuple[Any, ...]:
    """The arguments of an operator; if it indexes, with indices instead of masks with known values."""
    if packet not in INDEXED or not any(_is_known_mask(each) for each in args[1]):
        return args
    indices: list[Any] = []
    for each in args[1]:
        if _is_known_mask(each):
            found = each.known_values.nonzero(as_tuple=True)
            indices += [remember(index.to("meta"), index) for index in found]
        else:
            indices.append(each)
    return args[0], indices, *args[2:]


def _is_known_mask(index: Any) -> bool:
    """Whether an index is a shape-only mask whose values are known."""
    return (
        isinstance(index, Tensor)
        and index.is_meta
        and index.dtype == torch.bool
        and _values(index) is not None
    )


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
