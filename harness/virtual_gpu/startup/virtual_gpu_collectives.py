"""Collectives with values: integers, as token counts and pickled objects, and small floats, as losses.

The virtual NCCL moves nothing. Small tensors are exchanged here instead, through the key-value store that the
ranks share; or, where one rank runs alone, as if every other rank had what this one has. The result of a
larger tensor is unknown, and so is that of values which a rank does not know itself.
"""

import math
import os
import pickle
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from virtual_gpu_held import (
    await_values,
    can_hold,
    forget,
    hold,
    is_assumed,
    is_held,
    is_of_floats,
    is_plain,
    values_of,
)
from virtual_gpu_keys import BELOW, KEYS, has_a_mode, past, switched
from virtual_gpu_operators import tensors_in

MOST_BYTES = {True: 1 << 12, False: 1 << 24}
"""The largest tensor that is exchanged, of floats (True) and of integers."""
PART_BYTES = 4 << 20
"""The most that is put under one key of the store, which refuses more than 8 MiB."""
ALONE = os.environ.get("VIRTUAL_GPU_ALONE") == "1"

_numbers = {}
"""How many exchanges there were, by process group, and how many messages, by sender, receiver and tag."""
_kept = []
_reduction = dist.ReduceOp.SUM
"""How the collective that runs now reduces: noted where Python can see it (`_noting_reduction`)."""


def install():
    """Stand in front of the collectives. To be called once, after torch.distributed is imported."""
    library, functional = (torch.library.Library(name, "IMPL") for name in ("c10d", "_c10d_functional"))
    _kept.extend((library, functional))
    for name, exchange in _EXCHANGES.items():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, _kernel(operator, exchange), KEYS[False], with_keyset=True)
    for name in ("all_reduce", "all_reduce_", "reduce_scatter_tensor"):
        operator = getattr(torch.ops._c10d_functional, name).default
        functional.impl(name, _noting_name(operator), KEYS[False], with_keyset=True)
    for name in ("AllreduceOptions", "ReduceOptions", "ReduceScatterOptions"):
        setattr(c10d, name, _noting_reduction(getattr(c10d, name)))


def _kernel(operator, exchange):
    """A kernel for `operator`: it runs the original, which takes memory and time, and exchanges values."""
    place = next(n for n, a in enumerate(operator._schema.arguments) if a.name == "process_group")
    redispatch, below = operator._handle.redispatch_boxed, BELOW[False]
    most = _most_bytes(exchange)

    def kernel(keys, *arguments):
        global _reduction
        result = past(redispatch, keys & below, *arguments)  # its copies make the outputs unknown
        tensors = tensors_in(arguments)
        if tensors and not has_a_mode(keys):
            group = dist.ProcessGroup.unbox(arguments[place])
            action = exchange if all(_is_exchanged(tensor, most) for tensor in tensors) else _forget_written
            if action is exchange or not _leaves_as_it_is(exchange, group, arguments):
                with torch.no_grad():
                    switched(action, False)(group, *arguments)
        _reduction = dist.ReduceOp.SUM
        return result

    return kernel


def _noting_reduction(options):
    """A class of options of a collective that notes its reduction: the dispatcher passes the options on in a
    form that Python cannot read."""

    class Options(options):
        def __setattr__(self, name, value):
            global _reduction
            if name == "reduceOp":
                _reduction = value
            super().__setattr__(name, value)

    return Options


def _noting_name(operator):
    """A kernel for a functional collective, which has its reduction as text and makes its options in C++."""
    redispatch, below = operator._handle.redispatch_boxed, BELOW[False]

    def kernel(keys, tensor, reduction, *arguments):
        global _reduction
        if not has_a_mode(keys):
            _reduction = getattr(dist.ReduceOp, reduction.upper(), dist.ReduceOp.SUM)
        return redispatch(keys & below, tensor, reduction, *arguments)

    return kernel


def _is_exchanged(tensor, most_bytes):
    """Whether a tensor's values are exchanged. All ranks have to agree, so this depends on nothing but its
    type and size."""
    if ALONE and tensor.is_cpu:
        return True  # a tensor of gloo
    size = tensor.numel() * tensor.element_size()
    return is_plain(tensor) and size <= most_bytes[is_of_floats(tensor)]


def _most_bytes(exchange):
    """The largest tensor that `exchange` exchanges, of floats (True) and of integers."""
    if exchange in (_all_to_all, _all_to_all_base):  # sizes differ by rank, so a limit would divide the ranks
        return {True: 0, False: math.inf}
    if exchange in (_send, _receive):  # whoever reads a message waits for it: floats are not worth that
        return {**MOST_BYTES, True: 0}
    return MOST_BYTES


def _leaves_as_it_is(exchange, group, arguments):
    """Whether a collective writes nothing on this rank."""
    if exchange is _broadcast:
        return arguments[2] == group.rank()
    if exchange is _reduce:
        return arguments[3] != group.rank()
    return exchange is _send


def _from_all(group, ours):
    """What every rank of the group gives, in order of the ranks; this one gives `ours`."""
    size, rank = group.size(), group.rank()
    if ALONE or size == 1:
        return [ours] * size
    number = _numbers[group.group_name] = _numbers.get(group.group_name, 0) + 1
    key = f"virtual_gpu/{group.group_name}"
    _put(f"{key}/{number}/{rank}", ours)
    values = [ours if other == rank else _taken(f"{key}/{number}/{other}") for other in range(size)]
    if number > 1:  # all ranks that have come to this exchange have read the one before
        _delete(f"{key}/{number - 1}/{rank}")
    return values


def _put(key, value):
    """Put `value` into the store, in parts. The first byte of each part says whether another one follows."""
    data, store = pickle.dumps(value), c10d._get_default_store()
    starts = range(0, len(data), PART_BYTES)
    for start in reversed(starts):
        is_last = start == starts[-1]
        store.set(f"{key}+{start}", bytes([not is_last]) + data[start : start + PART_BYTES])


def _taken(key):
    """What another rank puts into the store under `key`; waits for it."""
    store, parts = c10d._get_default_store(), []
    while not parts or parts[-1][0]:
        parts.append(store.get(f"{key}+{len(parts) * PART_BYTES}"))
    return pickle.loads(b"".join(part[1:] for part in parts))  # noqa: S301  # written by the same program


def _delete(key):
    store, start = c10d._get_default_store(), 0
    while store.delete_key(f"{key}+{start}"):
        start += PART_BYTES


def _forget_written(group, written, *_):
    """In the place of an exchange: the values of the tensors that it would write are unknown."""
    for tensor in tensors_in((written,)):
        _write(tensor, None)


def _values(tensor):
    """A copy of the tensor's values, without the rest of its storage, to be pickled; None where this rank
    does not know them."""
    if not (tensor.is_cpu or is_held(tensor) or is_assumed(tensor)):
        return None
    host = tensor if tensor.is_cpu else values_of(tensor)
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(host)


def _tensors_from_all(group, tensors):
    return _from_all(group, [_values(tensor) for tensor in tensors])


def _write(tensor, value):
    """Give `tensor` these values; None: they are unknown."""
    view = None
    if value is not None:
        view = tensor if tensor.is_cpu else hold(tensor) if can_hold(tensor, sent=True) else None
    if view is not None:
        view.copy_(value.view(view.shape))
    elif is_plain(tensor):
        forget(tensor)


def _reduced(values):
    """All ranks' values of a tensor in one, by the collective's reduction; None where one is unknown."""
    if any(value is None for value in values):
        return None
    stacked = torch.stack(values)
    kind = _reduction if isinstance(_reduction, dist.ReduceOp.RedOpType) else _reduction.op
    kinds = dist.ReduceOp
    if kind == kinds.MAX:
        return stacked.amax(0)
    if kind == kinds.MIN:
        return stacked.amin(0)
    if kind == kinds.PRODUCT:
        return stacked.prod(0)
    total = stacked.sum(0).to(stacked.dtype)
    return torch.div(total, len(values)).to(total.dtype) if kind == kinds.AVG else total


def _all_reduce(group, tensors, *_):
    _reduce(group, tensors, None, None, group.rank())


def _reduce(group, tensors, process_group, reduction, root, *_):
    every = _tensors_from_all(group, tensors)
    if group.rank() == root:
        for n, tensor in enumerate(tensors):
            _write(tensor, _reduced([theirs[n] for theirs in every]))


def _broadcast(group, tensors, process_group, root, *_):
    for tensor, value in zip(tensors, _tensors_from_all(group, tensors)[root], strict=True):
        _write(tensor, value)


def _all_gather(group, outputs, inputs, *_):
    for rank, theirs in enumerate(_tensors_from_all(group, inputs)):
        for gathered, value in zip(outputs, theirs, strict=True):
            _write(gathered[rank], value)


def _all_gather_base(group, output, source, *_):
    every = [theirs for (theirs,) in _tensors_from_all(group, [source])]
    unknown = any(theirs is None for theirs in every)
    _write(output, None if unknown else torch.cat([theirs.flatten() for theirs in every]))


def _all_gather_each(group, outputs, sources, *_):
    for output, source in zip(outputs, sources, strict=True):
        _all_gather_base(group, output, source)


def _gather(group, outputs, inputs, process_group, root, *_):
    every = _tensors_from_all(group, inputs)
    if group.rank() == root:
        for rank, (theirs,) in enumerate(every):
            _write(outputs[0][rank], theirs)


def _scatter(group, outputs, inputs, process_group, root, *_):
    parts = [_values(part) for part in inputs[0]] if inputs else []
    theirs = _from_all(group, parts)[root]
    if theirs:
        _write(outputs[0], theirs[group.rank()])


def _reduce_scatter(group, outputs, inputs, *_):
    parts = [theirs[group.rank()] for theirs in _tensors_from_all(group, inputs[0])]
    _write(outputs[0], _reduced(parts))


def _reduce_scatter_base(group, output, source, *_):
    every = [theirs for (theirs,) in _tensors_from_all(group, [source])]
    _write(
        output, _reduced([None if all_ is None else all_.chunk(len(every))[group.rank()] for all_ in every])
    )


def _reduce_scatter_each(group, outputs, sources, *_):
    for output, source in zip(outputs, sources, strict=True):
        _reduce_scatter_base(group, output, source)


def _all_to_all(group, outputs, inputs, *_):
    for output, theirs in zip(outputs, _tensors_from_all(group, inputs), strict=True):
        part = theirs[group.rank()]
        fits = part is not None and part.numel() == output.numel()  # always, but for one that runs alone
        _write(output, part if fits else None)


def _all_to_all_base(group, output, source, process_group, output_sizes, input_sizes, *_):
    parts = _split(source, input_sizes, group.size())
    _all_to_all(group, _split(output, output_sizes, group.size()), parts)


def _split(tensor, sizes, count):
    return list(tensor.split(sizes)) if sizes else list(tensor.chunk(count))


def _send(group, tensors, process_group, to, tag, *_):
    if ALONE:
        return
    key = _letter(group, group.rank(), to, tag)
    for n, tensor in enumerate(tensors):
        _put(f"{key}/{n}", _values(tensor))


def _receive(group, tensors, process_group, source, tag, *_):
    """Have the message fetched when the program first looks at its values: it may be sent later."""
    if ALONE:
        _forget_written(group, tensors)
        return
    key = _letter(group, source, group.rank(), tag)
    for n, tensor in enumerate(tensors):
        view = hold(tensor) if can_hold(tensor, sent=True) else None
        if view is not None:
            await_values(tensor, partial(_arrive, view, f"{key}/{n}"))


def _arrive(view, key):
    """Wait for a message and write it to `view`. Whether the sender knew the values."""
    value = _taken(key)
    _delete(key)
    if value is not None:
        with torch.no_grad():
            switched(view.copy_, False)(value.view(view.shape))
    return value is not None


def _letter(group, source, to, tag):
    """The key of the next message from rank `source` to rank `to` with this tag."""
    way = f"virtual_gpu/{group.group_name}/{source}-{to}/{tag}"
    number = _numbers[way] = _numbers.get(way, 0) + 1
    return f"{way}/{number}"


# What each collective of torch.distributed does with values: functions of (group, *the operator's arguments).
_EXCHANGES = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "allgather_into_tensor_coalesced_": _all_gather_each,
    "allgather_coalesced_": _forget_written,
    "gather_": _gather,
    "scatter_": _scatter,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_each,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all_base,
    "send": _send,
    "recv_": _receive,
    "recv_any_source_": _forget_written,
}
