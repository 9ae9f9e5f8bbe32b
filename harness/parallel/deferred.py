"""Builds a model one layer at a time: its construction is recorded on shape-only tensors, then replayed.

A model that is to be divided may be larger than the device. So it is built without memory, and a tape records
every operator that makes or changes one of its tensors, and the state of the random generator before each
draw. `make` then replays, for some of the modules, the operators that concern their tensors: the same
operators on the same random numbers, in whatever order modules are made, give the values of building the
whole model at once.

A checkpoint is loaded in the same way: the tape holds its tensors as they lie in the files, which are mapped
into memory and not read. The ranks of one machine read the same pages, when they make their units.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from harness.system import in_environment

META = torch.device("meta")
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
FROM_VALUES = torch.tensor
"""torch.tensor itself, whatever a simulation puts in its place later."""


@dataclass(frozen=True)
class _Call:
    """A call of an operator on shape-only tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    numbers: Tensor | None
    """The state of the random generator before the call, if it draws from it."""

    def reads(self) -> set[int]:
        """The keys (`_key`) of the tensors that it is given."""
        return {_key(tensor) for tensor in _shapes((self.args, self.kwargs))}

    def writes(self) -> set[int]:
        """The keys of the tensors that it makes or changes in place."""
        written = {_key(tensor) for tensor in _shapes(self.out)} - self.reads()
        for n, argument in enumerate(self.func._schema.arguments):
            given = self.args[n] if n < len(self.args) else self.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {_key(tensor) for tensor in _shapes(given)}
        return written


Make = Callable[[Iterable[nn.Module]], None]
"""Gives modules their memory and values, when they are about to be divided."""


class Deferred(TorchDispatchMode):
    """The tape of one model, which is made on `device` (cuda, cpu; or meta, where memory is simulated)."""

    def __init__(self, device: torch.device, then: Callable[[nn.Module], None] = lambda module: None) -> None:
        """`then` is called with every module once it is made (to quantize it)."""
        super().__init__()
        self.device, self.then = device, then
        self.left_out = False
        """Whether the tape misses a value, which was made in a way that no operator shows."""
        self.loading = False
        """Whether the values that are recorded now come from a checkpoint."""
        self.draws = True
        """Whether what is recorded now would draw random numbers on the device."""
        self._tape: list[tuple[_Call, set[int], set[int]]] = []
        """Each call, with the keys of the tensors that it reads and writes."""
        self._writers: dict[int, list[int]] = defaultdict(list)
        """The positions on the tape where a tensor, by its key, is made or changed."""

    @contextmanager
    def recording(self, *, loading: bool = False) -> Iterator[torch.device]:
        """Yields a device whose tensors have no memory inside the block, and are made later.

        Random numbers are drawn as if they had, one tensor at a time, so that later draws give the same ones.
        `loading`: the values come from a checkpoint. Weights that are built `with` META as the device, before
        it is read, are not drawn.
        """
        self.loading = loading
        with self, _AsOnTheDevice(self):
            yield META

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _shapes((args, kwargs)) and kwargs.get("device") != META:
            return func(*args, **kwargs)
        numbers = None
        # a simulation reads no checkpoint, and its shapes are made at random; no rank of a run draws those
        draws = self.draws and not (self.loading and self.device == META)
        if torch.Tag.nondeterministic_seeded in func.tags and draws:
            numbers = self._generator().get_state()
            self._draw(func, args, kwargs)
        with _disable_current_modes():  # a counter of bytes sees what is made later
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs = {
                **kwargs,
                "dtype": out.dtype,
            }  # the default dtype may be another one when it is replayed
        with _disable_current_modes():  # a parameter may be given other memory later (.data)
            args, kwargs, out_then = tree_map(
                lambda x: x.detach() if _is_shape(x) else x, (args, kwargs, out)
            )
        call = _Call(func, args, kwargs, out_then, numbers)
        writes = call.writes()
        for key in writes:
            self._writers[key].append(len(self._tape))
        if writes:  # a view writes nothing
            self._tape.append((call, call.reads(), writes))
        return out

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Call an operator that draws random numbers on a tensor with memory, to advance the generator."""
        args, kwargs = tree_map(lambda x: self._like(x) if _is_shape(x) else x, (args, kwargs))
        func(*args, **self._placed(kwargs))

    def knows(self, model: nn.Module) -> bool:
        """Whether the tape can make all of `model`'s tensors: its own code may do what no operator shows."""
        read = {key for _, reads, _ in self._tape for key in reads}
        held = {_key(tensor) for tensor in _shapes([*model.parameters(), *model.buffers()])}
        return read | held <= self._writers.keys() and not self.left_out

    def maker(self, model: nn.Module) -> Make:
        """A function that gives modules of `model` the memory and values of their parameters and buffers, one
        module after the other.

        A tied parameter is put into every module that has it; what is made already is left alone. `model` is
        as it was built: a tensor that is in no module of it any more can no longer be made.
        """
        places: dict[Tensor, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        for part in model.modules():
            for held in (part._parameters, part._buffers):
                for name, tensor in held.items():
                    if tensor is not None and _is_shape(tensor) and _key(tensor) in self._writers:
                        places[tensor].append((held, name))

        def make(modules: Iterable[nn.Module]) -> None:
            for part in dict.fromkeys(part for module in modules for part in module.modules()):
                held = [t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None]
                missing = [tensor for tensor in held if tensor in places]
                if missing:
                    self._place({tensor: places.pop(tensor) for tensor in dict.fromkeys(missing)})
                    self.then(part)

        return make

    @torch.no_grad()
    def _place(self, places: dict[Tensor, list[tuple[dict[str, Any], str]]]) -> None:
        """Make the tensors whose shape-only stand-ins are the keys of `places`, and put them there: each
        place is a module's dict of parameters or buffers, and a name."""
        made = self._play({_key(shape) for shape in places})
        for shape, holders in places.items():
            new = _view(made[_key(shape)], shape)
            if isinstance(shape, nn.Parameter):  # or what a library derives from it (bitsandbytes)
                new = new.detach().as_subclass(type(shape)).requires_grad_(shape.requires_grad)
                vars(new).update(vars(shape))
            for held, name in holders:
                held[name] = new

    def _play(self, keys: set[int]) -> dict[int, Tensor]:
        """The tensors of the storages `keys`, made by replaying the calls of the tape that concern them."""
        concerned: list[int] = []
        last_use: dict[int, int] = dict.fromkeys(keys, len(self._tape))
        ahead = [-at for at in {at for key in keys for at in self._writers[key]}]
        heapify(ahead)  # from the tape's end to its start: a call reads what was written before it
        while ahead:
            at = -heappop(ahead)
            if concerned and concerned[-1] == at:
                continue
            concerned.append(at)
            for key in self._tape[at][1]:
                if key not in last_use:
                    last_use[key] = at
                    for earlier in self._writers[key]:
                        if earlier < at:
                            heappush(ahead, -earlier)
        made: dict[int, Tensor] = {}
        generator = self._generator()
        before = generator.get_state()
        for at in reversed(concerned):
            call, reads, writes = self._tape[at]
            args, kwargs = tree_map(
                lambda x: _view(made[_key(x)], x) if _is_shape(x) else x, (call.args, call.kwargs)
            )
            if call.numbers is not None:
                generator.set_state(call.numbers)
            out = call.func(*args, **self._placed(kwargs))
            for shape, tensor in zip(tree_leaves(call.out), tree_leaves(out), strict=True):
                if _is_shape(shape):
                    made.setdefault(_key(shape), tensor)
            args = kwargs = out = tensor = None  # the last references to what is not needed any more
            concluded = {key for key in reads | writes if last_use.get(key, at) <= at}
            for key in [key for key in made if key in concluded]:  # in the order made: a set's order varies
                del made[key]
        generator.set_state(before)
        return made

    def _generator(self) -> torch.Generator:
        """The generator of the device's random numbers."""
        if self.device.type == "cuda":
            return torch.get_device_module(self.device).default_generators[self.device.index or 0]
        return torch.default_generator

    def _placed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the device in the place of META."""
        return {**kwargs, "device": self.device} if kwargs.get("device") == META else kwargs

    def _like(self, shape: Tensor) -> Tensor:
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self.device)


class _AsOnTheDevice(TorchFunctionMode):
    """Makes code behave on shape-only tensors as it would on the device, where it asks for the difference.

    torch.tensor puts values onto META without an operator that a mode sees: they are copied there by one.
    An empty tensor stays on the host. By the device of torch.tensor([]) transformers decides whether weights
    are drawn (get_torch_context_manager_or_global_device), and here they are, unless a checkpoint has them.
    And torch.nn.init, where is_meta says so, leaves out what looks at the numbers that it draws
    (trunc_normal_, orthogonal_): then `Deferred.left_out` is set.
    """

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is FROM_VALUES and torch.device(kwargs.get("device") or "cpu") == META:
            values = func(*args, **{**kwargs, "device": "cpu"})
            return values.to(META) if values.numel() or self.deferred.loading else values
        if func == IS_META:
            self.deferred.left_out |= "torch.nn.init" in _callers()  # `with device` may stand between
        self.deferred.draws = not (self.deferred.loading and "torch.utils._device" in _callers())
        try:
            return func(*args, **kwargs)
        finally:
            self.deferred.draws = True


def _callers() -> list[Any]:
    """The names of the modules of the five innermost functions on the stack, the innermost first."""
    return [frame.f_globals.get("__name__") for frame, _ in islice(walk_stack(None), 5)]


def loaded_by_one_thread() -> AbstractContextManager[None]:
    """Inside, transformers loads a checkpoint in the calling thread, whose operators are followed.

    The switch is transformers' (core_model_loading.py). It changes the order of loading, not what is kept.
    """
    return in_environment({"HF_DEACTIVATE_ASYNC_LOAD": "1"})


def _is_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


def _shapes(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if _is_shape(value)]


def _key(tensor: Tensor) -> int:
    """The identity of a tensor's storage. The tape keeps its tensors, so that no other storage gets it."""
    return tensor.untyped_storage()._cdata


def _view(whole: Tensor, shape: Tensor) -> Tensor:
    """A view of `whole` with `shape`'s dtype and geometry: the part that `shape` is of its storage."""
    geometry = tuple(shape.shape), shape.stride(), shape.storage_offset()
    if whole.dtype == shape.dtype and geometry == (
        tuple(whole.shape),
        whole.stride(),
        whole.storage_offset(),
    ):
        return whole
    if whole.dtype != shape.dtype:
        count = whole.untyped_storage().nbytes() // whole.element_size()
        whole = whole.as_strided((count,), (1,), 0).view(shape.dtype)
    return whole.as_strided(*geometry)
