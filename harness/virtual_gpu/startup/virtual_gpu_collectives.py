"""Collectives whose values are looked at: integers, as token counts and pickled objects are.

NCCL's stand-in moves nothing. Small tensors of integers are exchanged here, through the store that the
processes have in common; or, where one rank runs alone, as if every other had what this one has. Floats stay
what they are.
"""

import os
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from virtual_gpu_held import can_hold, hold, is_plain, values_of
from virtual_gpu_values import BELOW, KEYS, switched

MOST_BYTES = 1 << 24
"""Of one tensor; what is larger moves nothing."""
ALONE = os.environ.get("VIRTUAL_GPU_ALONE") == "1"

_numbers = {}
_kept = []
_reduction = dist.ReduceOp.SUM


def install():
    """Stand in front of the collectives. To be called once, after torch.distributed is imported."""
    library = torch.library.Library("c10d", "IMPL")
    _kept.append(library)
    for name, exchange in _EXCHANGES.items():
        operator = getattr(torch.ops.c10d, name).default
        library.impl(name, _kernel(operator, exchange), KEYS[False], with_keyset=True)
    for name in ("AllreduceOptions", "ReduceOptions", "ReduceScatterOptions"):
        setattr(c10d, name, _noting_reduction(getattr(c10d, name)))
    if ALONE:
        import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = _answer_for_all
        for module in (c10d, dist):
            module.broadcast_object_list = _keep_ours


def _kernel(operator, exchange):
    place = next(n for n, a in enumerate(operator._schema.arguments) if a.name == "process_group")
    redispatch, below = operator._handle.redispatch_boxed, BELOW[False]

    def kernel(keys, *arguments):
        global _reduction
        made = redispatch(keys & below, *arguments)
        tensors = _all_tensors(arguments)
        if tensors and all(map(_is_looked_at, tensors)):
            group = dist.ProcessGroup.unbox(arguments[place])
            with torch.no_grad():
                switched(exchange, False)(group, *arguments)
        _reduction = dist.ReduceOp.SUM
        return made

    return kernel


def _noting_reduction(options):
    """The options of a collective, which the dispatcher passes on so that Python cannot read them."""

    class Options(options):
        def __setattr__(self, name, value):
            global _reduction
            if name == "reduceOp":
                _reduction = value
            super().__setattr__(name, value)

    return Options


def _is_looked_at(tensor):
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    return (
        integers
        and is_plain(tensor)
        and tensor.numel() * tensor.element_size() <= MOST_BYTES
        and can_hold(tensor)
    )


def _all_tensors(values):
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _all_tensors(value)
    return found


def _from_all(group, tensors):
    """For every rank of the group, its `tensors` (those here: ours) as tensors of the host."""
    ours = [torch.empty(t.shape, dtype=t.dtype).copy_(values_of(t)) for t in tensors]
    size, rank = group.size(), group.rank()
    if ALONE or size == 1:
        return [ours] * size
    number = _numbers[group.group_name] = _numbers.get(group.group_name, 0) + 1
    store, key = c10d._get_default_store(), f"virtual_gpu/{group.group_name}"
    store.set(f"{key}/{number}/{rank}", b"".join(map(_bytes, ours)))
    found = []
    for other in range(size):
        found.append(ours if other == rank else _tensors(store.get(f"{key}/{number}/{other}"), ours))
    if number > 1:  # everyone has read it: who is here has been there
        store.delete_key(f"{key}/{number - 1}/{rank}")
    return found


def _bytes(tensor):
    return tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _tensors(data, like):
    made, start = [], 0
    data = bytearray(data)
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        if tensor.numel():
            made.append(
                torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(
                    tensor.shape
                )
            )
        else:
            made.append(tensor)
        start += size
    return made


def _write(tensor, value):
    view = hold(tensor)
    if view is not None:
        view.copy_(value.view(view.shape))


def _reduced(values):
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
    return total // len(values) if kind == kinds.AVG else total


def _all_reduce(group, tensors, *_):
    every = _from_all(group, tensors)
    for n, tensor in enumerate(tensors):
        _write(tensor, _reduced([theirs[n] for theirs in every]))


def _broadcast(group, tensors, process_group, root, *_):
    for tensor, value in zip(tensors, _from_all(group, tensors)[root], strict=True):
        _write(tensor, value)


def _all_gather(group, outputs, inputs, *_):
    for rank, theirs in enumerate(_from_all(group, inputs)):
        for gathered, value in zip(outputs, theirs, strict=True):
            _write(gathered[rank], value)


def _all_gather_base(group, output, source, *_):
    _write(output, torch.cat([theirs.flatten() for (theirs,) in _from_all(group, [source])]))


def _gather(group, outputs, inputs, process_group, root, *_):
    every = _from_all(group, inputs)
    if group.rank() == root:
        for rank, (theirs,) in enumerate(every):
            _write(outputs[0][rank], theirs)


def _reduce_scatter_base(group, output, source, *_):
    _write(
        output,
        _reduced([theirs for (theirs,) in _from_all(group, [source])]).chunk(group.size())[group.rank()],
    )


def _all_to_all_base(group, output, source, process_group, output_sizes, input_sizes, *_):
    size, rank = group.size(), group.rank()
    if input_sizes or output_sizes:  # their sizes differ from ours: what comes is not known, but how much
        return
    parts = [theirs.chunk(size)[rank] for (theirs,) in _from_all(group, [source])]
    _write(output, torch.cat(parts))


_EXCHANGES = {
    "allreduce_": _all_reduce,
    "reduce_": _all_reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_base,
    "gather_": _gather,
    "_reduce_scatter_base_": _reduce_scatter_base,
    "alltoall_base_": _all_to_all_base,
}


class _Alone(dist.Store):
    """The store of a rank that runs alone: what the others would write is there as soon as it is asked
    for."""

    def __init__(self):
        super().__init__()
        self._found = {}

    def set(self, key, value):
        self._found[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        return self._found.get(key, bytes(128))

    def add(self, key, amount):
        total = int(self._found.get(key, b"0")) + amount
        self._found[key] = str(total).encode()
        return total

    def compare_set(self, key, expected, desired):
        if self._found.get(key, b"") == expected:
            self._found[key] = desired
        return self._found.get(key, expected)

    def check(self, keys):
        return all(key in self._found for key in keys)

    def wait(self, keys, timeout=None):
        return None

    def delete_key(self, key):
        return self._found.pop(key, None) is not None

    def append(self, key, value):
        self._found[key] = self._found.get(key, b"") + bytes(value)

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def multi_set(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self):
        return True

    def clone(self):
        return self

    def num_keys(self):
        return len(self._found)

    def set_timeout(self, timeout):
        return None


def _keep_ours(object_list, *arguments, **options):
    """What another rank would say of objects, their size to begin with, nobody knows: they stay as they are
    here."""


def _answer_for_all(url, timeout=None, **_):
    store = _Alone()
    _kept.append(store)  # C++ alone would not keep what Python says of it
    yield store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    raise RuntimeError("a rank that runs alone cannot form the group anew")
