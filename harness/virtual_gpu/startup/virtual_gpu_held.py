"""Which tensors of the virtual device have known values, and where these lie in host memory.

A storage of the virtual device is *held* once a known value was written to it: data of the host, or what
follows from such data. Its values lie in host memory, at a fixed distance from its addresses (c/memory.c). A
storage that is not held reads as zeros. The host memory is bounded: a storage that is too large is not held.
"""

import ctypes

import torch

MOST_BYTES = {True: 1 << 20, False: 1 << 26}
"""The largest storage that is held, of floats (True) and of integers; 64 MiB is a mask of 8192 x 8192."""
BUDGET_BYTES = {True: 64 << 20, False: 128 << 20}
"""Of all held storages together. Floats have their own, so that they never leave integers without room, as
the weights of adapters could."""
MOST_OF_8_BITS = 1 << 16
"""The most bytes of 8-bit integers that are held, unless they came from the host or another rank: more are
weights that the device quantizes, which would leave no room."""
SWEEP_EVERY = 2000
"""After so many notes about storages, those of storages that are gone are removed."""
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_PAGE = 4096
_MADV_DONTNEED = 4

_C = ctypes.CDLL(None)
_C.virtual_gpu_values.restype = ctypes.c_void_p
_C.virtual_gpu_values.argtypes = [ctypes.c_void_p]
_C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_held = {}
"""The held storages, by the address of the StorageImpl, which lives on while it is referred to weakly:
(device pointer, bytes, whether it has floats)."""
_awaited = {}
"""By the same address: functions that wait for what another rank sends, and write it there."""
_assumed = {}
"""By the same address: device pointers of integers that are too large to hold and that follow from floats
which only kernels would have computed, and which are taken for zeros."""
_unknown = {}
"""By the same address: device pointers of integers and booleans that an operator wrote and that are not
known. A known value that is written to a part of them later does not make the rest known."""
_presumed = {}
"""By the same address: device pointers of results of `all` over unknown values, which read as true."""
_bytes = {True: 0, False: 0}
"""Bytes of the held storages, of floats (True) and of integers."""
_marks = 0
"""How many notes about storages were made."""


def is_plain(tensor):
    """Whether a tensor is on the device, dense, and no subclass or wrapper that stands for other tensors."""
    return (
        tensor.is_cuda
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is _NO_DISPATCH
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def is_held(tensor):
    """Whether the values of a plain tensor are known."""
    # not tensor.untyped_storage()._cdata: a storage that Python has seen has one more reference, and autograd
    # adds gradients out of place then
    address = torch._C._storage_address(tensor)
    for arrive in _awaited.pop(address, ()):
        if not arrive():
            forget(tensor)
    entry = _held.get(address)
    return entry is not None and entry[0] == tensor.untyped_storage().data_ptr()


def assume(tensor):
    """Note that the tensor's integers are not held, and would follow from floats that are taken for zeros."""
    _note(_assumed, tensor)


def _note(notes, tensor):
    """Enter the tensor's storage into `notes`: _assumed, _unknown or _presumed."""
    _mark()
    storage = tensor.untyped_storage()
    if notes.pop(storage._cdata, None) is None:
        storage._weak_ref()  # given back by _sweep
    notes[storage._cdata] = storage.data_ptr()


def _is_noted(notes, tensor):
    pointer = notes.get(torch._C._storage_address(tensor)) if notes else None
    return pointer is not None and pointer == tensor.untyped_storage().data_ptr()


def is_assumed(tensor):
    return _is_noted(_assumed, tensor)


def presume(tensor):
    """Note that the tensor reads as true though nobody knows its value."""
    _note(_presumed, tensor)


def presumed(tensor):
    """What a value that nobody knows reads as: 1 for a tensor that `presume` noted, else 0."""
    return int(_is_noted(_presumed, tensor))


def await_values(tensor, arrive):
    """Have `arrive` called when the values of `tensor`, which is held, are first looked at. It writes them,
    and returns whether they are known."""
    _awaited.setdefault(torch._C._storage_address(tensor), []).append(arrive)


def can_hold(tensor, sent=False):
    """Whether known values may be written to the tensor, so that it is held afterwards. `sent`: whether they
    come from the host or another rank.

    Its storage must have memory and be small enough for what is left of the budget. The tensor must not be a
    part of a storage whose other values are unknown; of floats that are not held all are, since kernels write
    most of them unseen.
    """
    floats = is_of_floats(tensor)
    is_weight = not sent and tensor.dtype in (torch.uint8, torch.int8)
    most = MOST_OF_8_BITS if is_weight else MOST_BYTES[floats]
    if tensor.numel() * tensor.element_size() > most:
        return False
    size = tensor.untyped_storage().nbytes()
    if not 0 < size <= most:
        return False
    if is_held(tensor):
        return True
    if tensor.numel() * tensor.element_size() < size and (floats or _is_noted(_unknown, tensor)):
        return False
    if _bytes[floats] + size > BUDGET_BYTES[floats]:
        _sweep()
    return _bytes[floats] + size <= BUDGET_BYTES[floats]


def is_of_floats(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def hold(tensor):
    """The tensor's values as a tensor of the host with the same strides, to read and to write. A storage that
    was not held is from now on, filled with zeros.

    None where host memory has no place for the values: with VIRTUAL_GPU_ADDRESSES down or random, or full.
    """
    view = _view(tensor)
    if view is None or is_held(tensor):
        return view
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    old = _held.pop(storage._cdata, None)
    if old is None:
        storage._weak_ref()  # given back by _sweep
    else:
        _bytes[old[2]] -= old[1]
    if _unknown.pop(storage._cdata, None) is not None:
        torch.UntypedStorage._free_weak_ref(storage._cdata)
    floats = is_of_floats(tensor)
    _held[storage._cdata] = storage.data_ptr(), size, floats
    _bytes[floats] += size
    ctypes.memset(_C.virtual_gpu_values(storage.data_ptr()), 0, size)
    _mark()
    return view


def _mark():
    """Count a note, and sweep from time to time."""
    global _marks
    _marks += 1
    if _marks % SWEEP_EVERY == 0:
        _sweep()


def forget(tensor):
    """Note that the tensor's values are not known any more."""
    address = torch._C._storage_address(tensor)
    _awaited.pop(address, None)
    entry = _held.pop(address, None)
    if entry is not None:
        _bytes[entry[2]] -= entry[1]
        torch.UntypedStorage._free_weak_ref(address)
    for notes in (_assumed, _presumed):
        if notes.pop(address, None) is not None:
            torch.UntypedStorage._free_weak_ref(address)
    if not is_of_floats(tensor) and tensor.numel():
        _note(_unknown, tensor)


def values_of(tensor):
    """The tensor's values as a tensor of the host; of one that is not held, zeros that take no memory."""
    if is_plain(tensor) and is_held(tensor):
        return _view(tensor)
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def answer(number):
    """Have this thread's next copies from the device read `number`: an operator's kernel would have counted
    it. None ends that."""
    data = b"" if number is None else number.to_bytes(8, "little")
    _C.virtual_gpu_answer(data, ctypes.c_size_t(len(data)))


def _view(tensor):
    """The tensor's values as a tensor of the host, without a copy; None where they have no place."""
    storage = tensor.untyped_storage()
    pointer = _C.virtual_gpu_values(storage.data_ptr())
    if not pointer:
        return None
    host = torch._C._construct_storage_from_data_pointer(pointer, torch.device("cpu"), storage.nbytes())
    shape = tensor.size(), tensor.stride()
    values = torch.empty(0, dtype=tensor.dtype).set_(host, tensor.storage_offset(), *shape)
    if tensor.is_conj():
        values = values.conj()
    return torch._neg_view(values) if tensor.is_neg() else values


def _sweep():
    """Remove the notes of storages that are gone, and give back their pages of values, unless another storage
    lies at the same addresses now."""
    gone = [address for address in _held if torch.UntypedStorage._expired(address)]
    ranges = [_held.pop(address) for address in gone]
    for notes in (_assumed, _unknown, _presumed):
        for address in [address for address in notes if torch.UntypedStorage._expired(address)]:
            del notes[address]
            torch.UntypedStorage._free_weak_ref(address)
    for address in gone:
        _awaited.pop(address, None)
        torch.UntypedStorage._free_weak_ref(address)
    for _, size, floats in ranges:
        _bytes[floats] -= size
    here = sorted(_held.values())
    for start, size, _ in ranges:
        if size >= 1 << 16 and not any(s < start + size and start < s + n for s, n, _ in here):
            pointer = _C.virtual_gpu_values(start)
            if pointer:
                first = -(-pointer // _PAGE) * _PAGE
                _C.madvise(first, max(0, (pointer + size - first) // _PAGE * _PAGE), _MADV_DONTNEED)
