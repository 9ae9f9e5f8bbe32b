"""Follows every tensor storage from its allocation ("born") to its free ("died") while a step runs, on the
CPU or on shape-only tensors.

Where there is no CUDA allocator with counters, "allocated" means what this counts; in a simulation it feeds
the model of that allocator.
"""

import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from harness.training import is_dense, is_on_host

aten = torch.ops.aten
_get_dispatch_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
Frame = tuple[CodeType, int]
"""A code object and a line number: enough for a file, a function and a line, and cheap to keep."""
MAX_FRAMES = 32
"""How many frames of a stack are kept, the innermost ones. An operator of a QLoRA layer that is checkpointed
is 25 calls deep in the training step, with transformers 5.24 29."""
_resize = torch.UntypedStorage.resize_
_SKIPPED = (__file__, nn_module.__file__)
"""Files whose frames are left out: every call of a module has three in torch.nn.modules.module."""


_HELD_BY_THE_CALL = 4
"""The references to an argument that only the engine's buffer holds: that one, and three of the call."""


class Sink(Protocol):
    """What is told about storages. `key` is a new integer for every allocation. `element_bytes`: the bytes of
    one number of the tensor that it was made for; 0 where it was made for none."""

    def born(
        self,
        key: int,
        size_bytes: int,
        on_host: bool,
        op: str,
        frames: tuple[Frame, ...],
        element_bytes: int = 0,
    ) -> None: ...
    def died(self, key: int, size_bytes: int, on_host: bool) -> None: ...


def _nothing() -> None: ...


class StorageTracker(TorchDispatchMode):
    """While active, tells `sink` of each storage that an operator makes, and of its free at any time."""

    def __init__(self, sink: Sink, *, frames: bool = False) -> None:
        super().__init__()
        self.sink = sink
        self.frames = frames
        self.on_host: set[int] = set()
        """Keys of live storages made inside `on_host()`."""
        self.begin_own_work: Callable[[], None] = _nothing
        """Called before the tracker does what no program does: a simulation does not count its calls."""
        self.end_own_work: Callable[[], None] = _nothing
        """Called after it."""
        self._keys: dict[int, int] = {}
        """The keys of live storages, by their address."""
        self._refs: dict[int, Any] = {}
        """Weak references to them, by key, whose callbacks tell of frees."""
        self._next_key = 0
        self._unpacked: Any = None
        """The operator that a wrapper tensor (DTensor) was called with, until its inner operator comes."""
        self._stacks: dict[tuple[int, ...], tuple[Frame, ...]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no step is compiled under a tracker, and the wrapper costs more than the tracker

    def __enter__(self) -> Self:
        torch.UntypedStorage.resize_ = self._resizing  # type: ignore[method-assign]
        self.push()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.pop(*exception)
        torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]

    def push(self) -> None:
        """Become active as a dispatch mode. A measurement on the CPU overrides its place among modes."""
        super().__enter__()

    def pop(self, *exception: Any) -> None:
        """Become inactive."""
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _get_dispatch_mode(_FAKE) is not None:
            # DTensor asks for the shapes of an operator's results: nothing is allocated
            return func(*args, **(kwargs or {}))
        self.begin_own_work()
        try:
            for tensor_type in types:
                if tensor_type is not Tensor and _is_wrapper(tensor_type):
                    self._unpacked = func
                    return self.unwrapped(func, args, kwargs or {})
            # with a mode or without, autograd does to a wrapper nothing in place
            of_wrapper, self._unpacked = self._unpacked, None
            if id(func) in _DIFFERENT:  # an operator's hash is a Python function
                if func in _IN_PLACE and func is not of_wrapper and _in_engine(sys._getframe(1)):
                    func, args = _as_without_a_mode(func, args)
                if func in _INDEXING:
                    self._see(args[1], "lift_fresh")
            out = self.run(func, args, kwargs or {})
            self._see(out, func)
            return out
        finally:
            self.end_own_work()

    def unwrapped(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute an operator on wrapper tensors (DTensor). They unpack themselves, and the operators on what
        they wrap come back here."""
        return NotImplemented

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Execute one operator. A simulation overrides this with CUDA's behaviour."""
        return func(*args, **kwargs)

    def follows(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is followed at all; overridden to leave some out."""
        return True

    def gone(self, key: int) -> None:
        """Called when a storage was freed; overridden by a simulation, for its clock."""

    def key_of(self, tensor: Tensor) -> int | None:
        """The key of `tensor`'s storage; None if it is not followed."""
        return self._keys.get(storage_of(tensor)._cdata)

    def adopt(self, tensor: Tensor) -> int | None:
        """Follow a tensor that was made while the tracker was not active. Returns its key."""
        storage = storage_of(tensor)
        if storage._cdata not in self._keys and self.follows(storage):
            self._born(storage, "adopted", tensor.element_size())
        return self.key_of(tensor)

    def stack(self) -> tuple[Frame, ...]:
        """The Python frames that called the operator, innermost first, without those in _SKIPPED.

        The same stack is the same object every time: steps repeat a few thousand.
        """
        innermost = frame = sys._getframe(2)
        # each frame as two integers: a line number takes a search, and hashing a code object hashes its code
        place: list[int] = []
        while frame is not None and len(place) < 2 * MAX_FRAMES:
            code = frame.f_code
            if code.co_filename not in _SKIPPED:
                place += (id(code), frame.f_lasti)
            frame = frame.f_back
        key = tuple(place)
        known = self._stacks.get(key)
        if known is None:  # it holds the code objects: no id is used again
            known = self._stacks[key] = _frames_from(innermost)
        return known

    @property
    def _resizing(self) -> Any:
        """In place of UntypedStorage.resize_, which is no operator. FSDP frees a gathered weight's memory by
        it, and allocates it anew the next time: the storage stays, while its allocations come and go.
        """

        def resize_(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            before = self._keys.pop(storage._cdata, None)
            resized = _resize(storage, size_bytes)
            if self.follows(storage):
                self._born(storage, "resize_", 0)
            if before is not None:  # what was there is copied first (native/cuda/Resize.cpp)
                self._refs[before].__callback__(None)
            return resized

        return resize_

    def _see(self, out: Any, func: Any) -> None:
        if isinstance(out, Tensor):
            if type(out) is not Tensor and _is_wrapper(type(out)):
                return  # what it wraps was seen (AsyncCollectiveTensor, of a collective's result)
            storage = out.untyped_storage()
            if storage._cdata not in self._keys and self.follows(storage):
                self._born(storage, func, out.element_size())
        elif isinstance(out, list | tuple):
            for item in out:
                self._see(item, func)

    def _born(self, storage: torch.UntypedStorage, func: Any, element_bytes: int) -> None:
        size_bytes = storage.nbytes()
        if size_bytes == 0:
            return
        address, key, on_host = storage._cdata, self._next_key, is_on_host()
        self._next_key += 1
        frames = self.stack() if self.frames else ()
        op = func if isinstance(func, str) else func._overloadpacket.__name__
        # may be out of memory: then there is no storage
        self.sink.born(key, size_bytes, on_host, op, frames, element_bytes)
        if on_host:
            self.on_host.add(key)

        def died(_: Any) -> None:
            self.begin_own_work()
            if self._keys.get(address) == key:
                del self._keys[address]
            del self._refs[key]
            self.on_host.discard(key)
            self.gone(key)
            self.sink.died(key, size_bytes, on_host)
            self.end_own_work()

        self._keys[address] = key
        self._refs[key] = weakref.ref(storage, died)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of `tensor`, or of the local part of a DTensor, whose own is as large as the whole."""
    local = getattr(tensor, "_local_tensor", None)
    return (tensor if local is None else local).untyped_storage()


_INDEXING = {
    *(aten.index.Tensor, aten.index_put.default, aten.index_put_.default),
    *(aten._index_put_impl_.default, aten._unsafe_index.Tensor),
}
"""Indexing operators. For x[[0, 2]] Python makes a tensor of the list on the device of x, by an operator that
a dispatch mode sees, but not for meta (autograd/python_variable_indexing.cpp, sequenceToVariable)."""
_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor,  # torch/csrc/autograd/input_buffer.cpp, accumulate
    # torch/csrc/autograd/FunctionsManual.cpp: index_backward, value_selecting_reduction_backward,
    # gather_backward (in TensorAdvancedIndexing.cpp) and masked_select_backward
    aten.index_put.default: aten._index_put_impl_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
}
"""The operators that autograd runs in place instead, but not under a dispatch mode, where
isTensorSubclassLike is always true."""
_DIFFERENT = {id(func) for func in (*_INDEXING, *_IN_PLACE)}
"""The ids of operators that run differently under a dispatch mode; operators live as long as torch."""


def _in_engine(caller: FrameType) -> bool:
    """Whether autograd's engine or a derivative in C++ called the operator, without Python in between."""
    return caller.f_code is _engine_run_backward.__code__ and not torch.is_grad_enabled()


def _as_without_a_mode(func: Any, args: Any) -> tuple[Any, Any]:
    """The operator and arguments that autograd would have called without a dispatch mode."""
    if func is aten.add.Tensor:
        return (_IN_PLACE[func] if _only_the_engine_has(args[0]) else func), args
    if func is aten.index_put.default:
        values, accumulate = args[2], len(args) > 3 and args[3]
        # without accumulation it is the derivative of index_put, which makes a new tensor anywhere
        return (_IN_PLACE[func], (args[0], args[1], values, True, True)) if accumulate else (func, args)
    return _IN_PLACE[func], args


def _only_the_engine_has(gradient: Tensor) -> bool:
    """Whether the engine may add a second gradient in place (input_buffer.cpp, can_accumulate_inplace)."""
    return (
        gradient._use_count() <= _HELD_BY_THE_CALL  # type: ignore[attr-defined]
        and torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) <= 2
        and is_dense(gradient)
    )


def _frames_from(frame: FrameType | None) -> tuple[Frame, ...]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        if frame.f_code.co_filename not in _SKIPPED:
            frames.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


def _is_wrapper(tensor_type: type) -> bool:
    """Whether a tensor class dispatches operators itself, as DTensor does."""
    return tensor_type.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
