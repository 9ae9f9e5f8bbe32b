"""Values in device memory that is never computed on: which storages have them, and where they lie on the
host.

A storage of the virtual device is *held* once a value was written to it that is known: data of the host, or
what follows from such data. Its values lie in host memory beside the device's addresses (c/memory.c). What is
not held reads as zeros. The host memory is bounded: what is too large is not held.
"""

import ctypes

import torch

MOST_BYTES = {True: 1 << 20, False: 1 << 26}
"""Of one storage, floats (True) and integers; 64 MiB is a mask of 8192 x 8192."""
BUDGET_BYTES = {True: 64 << 20, False: 128 << 20}
"""Of all storages together: floats, as the weights of adapters, never leave integers without room."""
SWEEP_EVERY = 2000
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_PAGE = 4096
_MADV_DONTNEED = 4

_C = ctypes.CDLL(None)
_C.virtual_gpu_values.restype = ctypes.c_void_p
_C.virtual_gpu_values.argtypes = [ctypes.c_void_p]
_C.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_held = {}
"""By the address of the storage's StorageImpl, which lives on while it is referred to weakly: (pointer,
bytes, whether of floats)."""
_awaited = {}
"""By the same address: what other ranks send, as functions that wait for it and write it."""
_assumed = {}
"""By the same address, the pointers of integers that are too large to hold and follow from what kernels
computed, which is taken for zeros."""
_unknown = {}
"""By the same address, the pointers of integers and booleans that an operator wrote and nobody knows: a part
of them that is written later makes nothing known of the rest."""
_presumed = {}
"""By the same address, the pointers of what says that all of such values are true: masks mostly are."""
_bytes = {True: 0, False: 0}
_marks = 0


def is_plain(tensor):
    """Whether a tensor is on the device itself, and neither sparse, nor one of those that stand for
    others."""
    return (
        tensor.is_cuda
        and tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is _NO_DISPATCH
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def is_held(tensor):
    """Whether the values of a plain tensor are known."""
    # not tensor.untyped_storage(): a storage that Python has seen is referred to once more, and autograd asks
    address = torch._C._storage_address(tensor)
    for arrive in _awaited.pop(address, ()):
        if not arrive():
            forget(tensor)
    found = _held.get(address)
    return found is not None and found[0] == tensor.untyped_storage().data_ptr()


def assume(tensor):
    """Its integers are not held, and would follow from zeros."""
    _note(_assumed, tensor)


def _note(notes, tensor):
    _mark()
    storage = tensor.untyped_storage()
    if notes.pop(storage._cdata, None) is None:
        storage._weak_ref()  # given back by _sweep
    notes[storage._cdata] = storage.data_ptr()


def _is_noted(notes, tensor):
    found = notes.get(torch._C._storage_address(tensor)) if notes else None
    return found is not None and found == tensor.untyped_storage().data_ptr()


def is_assumed(tensor):
    return _is_noted(_assumed, tensor)


def presume(tensor):
    """Whoever reads it is told that nobody knows it, and finds that it is true."""
    _note(_presumed, tensor)


def presumed(tensor):
    """What is read of values that nobody knows: not what another tensor left there."""
    return int(_is_noted(_presumed, tensor))


def await_values(tensor, arrive):
    """`arrive` writes the values of a tensor that is held, once they are looked at, and says whether they are
    known."""
    _awaited.setdefault(torch._C._storage_address(tensor), []).append(arrive)


def can_hold(tensor):
    """Whether values may be written to it: it has memory, is not too large, there is room, and it is not a
    part of what nobody knows. Of floats that are not held any part is: kernels write most of them, unseen."""
    floats = is_of_floats(tensor)
    most = MOST_BYTES[floats]
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
    """Its values as a tensor of the host, to read and to write; what was not held becomes so, as zeros.

    None where there is no room for values: another order of addresses, or no memory.
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
    global _marks
    _marks += 1
    if _marks % SWEEP_EVERY == 0:
        _sweep()


def forget(tensor):
    """Nobody knows its values any more."""
    address = torch._C._storage_address(tensor)
    _awaited.pop(address, None)
    found = _held.pop(address, None)
    if found is not None:
        _bytes[found[2]] -= found[1]
        torch.UntypedStorage._free_weak_ref(address)
    for notes in (_assumed, _presumed):
        if notes.pop(address, None) is not None:
            torch.UntypedStorage._free_weak_ref(address)
    if not is_of_floats(tensor) and tensor.numel():
        _note(_unknown, tensor)


def values_of(tensor):
    """Its values on the host; of a tensor that is not held, zeros that take no memory."""
    if is_plain(tensor) and is_held(tensor):
        return _view(tensor)
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def answer(number):
    """What the next copies to the host, within an operator, find counted. None: nothing any more."""
    data = b"" if number is None else number.to_bytes(8, "little")
    _C.virtual_gpu_answer(data, ctypes.c_size_t(len(data)))


def _view(tensor):
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
    """Forget the storages that are gone, and give their pages back unless another storage lies there now."""
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
