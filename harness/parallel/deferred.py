"""A model made later, layer by layer: what building it does is written down on shapes, and done when asked.

A model that is to be divided may be larger than the device. So it is built without memory, and a tape notes
every operator that made or changed one of its tensors, and where the random numbers stood before each draw.
`make` then plays for some of the modules what concerns their tensors: the same operators on the same random
numbers, in whatever order modules are asked for, give the values that building the whole at once gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from traceback import walk_stack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

META = torch.device("meta")
IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
FROM_VALUES = torch.tensor
"""Itself, whatever a simulation has put in its place."""


@dataclass(frozen=True)
class _Done:
    """An operator that was called on shapes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    numbers: Tensor | None
    """The state of the random numbers before it, if it draws any."""

    def reads(self) -> set[int]:
        return {_key(tensor) for tensor in _shapes((self.args, self.kwargs))}

    def writes(self) -> set[int]:
        """What it makes and what it changes in place."""
        written = {_key(tensor) for tensor in _shapes(self.out)} - self.reads()
        for n, argument in enumerate(self.func._schema.arguments):
            given = self.args[n] if n < len(self.args) else self.kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {_key(tensor) for tensor in _shapes(given)}
        return written


class Deferred(TorchDispatchMode):
    """The tape of one model, which is made on `device` (cuda, cpu; or meta, where memory is simulated)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.left_out = False
        """Whether a value was not made because it would be a shape's."""
        self._tape: list[tuple[_Done, set[int], set[int]]] = []

    @contextmanager
    def recording(self) -> Iterator[torch.device]:
        """Within, tensors on the device that is yielded have no memory, and are made later.

        Random numbers are drawn as if they had, one tensor at a time: what comes after draws the same ones.
        """
        with self, _AsOnTheDevice(self):
            yield META

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _shapes((args, kwargs)) and kwargs.get("device") != META:
            return func(*args, **kwargs)
        numbers = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            numbers = self._generator().get_state()
            self._draw(func, args, kwargs)
        with _disable_current_modes():  # who counts bytes sees what is made later
            out = func(*args, **kwargs)
        if isinstance(out, Tensor) and any(argument.name == "dtype" for argument in func._schema.arguments):
            kwargs = {**kwargs, "dtype": out.dtype}  # what is the default now may be another one then
        with _disable_current_modes():  # a parameter may be given other memory later (.data)
            args, kwargs, out_then = tree_map(
                lambda x: x.detach() if _is_shape(x) else x, (args, kwargs, out)
            )
        done = _Done(func, args, kwargs, out_then, numbers)
        writes = done.writes()
        if writes:  # a view is none
            self._tape.append((done, done.reads(), writes))
        return out

    def _draw(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        args, kwargs = tree_map(lambda x: self._like(x) if _is_shape(x) else x, (args, kwargs))
        func(*args, **self._placed(kwargs))

    def knows(self, model: nn.Module) -> bool:
        """Whether all tensors of `model` can be made: a family's own code may do what is on no tape."""
        written = self._written()
        read = {key for _, reads, _ in self._tape for key in reads}
        held = {_key(tensor) for tensor in _shapes([*model.parameters(), *model.buffers()])}
        return read | held <= written and not self.left_out

    @torch.no_grad()
    def make(self, modules: Iterable[nn.Module], model: nn.Module) -> None:
        """Give the parameters and buffers of `modules`, all within `model`, their memory and values.

        A parameter that is tied is made for every module that has it; what is made already is left alone.
        """
        written = self._written()
        inside = list(dict.fromkeys(part for module in modules for part in module.modules()))
        weights = {p: _key(p) for part in inside for p in part._parameters.values() if p is not None}
        buffers = {b: _key(b) for part in inside for b in part._buffers.values() if b is not None}
        weights, buffers = (
            {x: key for x, key in found.items() if key in written} for found in (weights, buffers)
        )
        made = self._play({*weights.values(), *buffers.values()})
        new: dict[Tensor, Any] = {buffer: _view(made[key], buffer) for buffer, key in buffers.items()}
        for weight, key in weights.items():
            new[weight] = nn.Parameter(_view(made[key], weight), weight.requires_grad)
            new[weight].__dict__.update(weight.__dict__)
        for part in model.modules():
            for held in (part._parameters, part._buffers):
                known = {name: new[old] for name, old in held.items() if old is not None and old in new}
                held.update(known)

    def _written(self) -> set[int]:
        return {key for *_, writes in self._tape for key in writes}

    def _play(self, wanted: set[int]) -> dict[int, Tensor]:
        """The tensors of the storages `wanted`, made from what the tape says of them."""
        needed, concerned = set(wanted), []
        for done, reads, writes in reversed(self._tape):
            if writes & needed:
                concerned.append(done)
                needed |= reads
        made: dict[int, Tensor] = {}
        generator = self._generator()
        before = generator.get_state()
        for done in reversed(concerned):
            args, kwargs = tree_map(
                lambda x: _view(made[_key(x)], x) if _is_shape(x) else x, (done.args, done.kwargs)
            )
            if done.numbers is not None:
                generator.set_state(done.numbers)
            out = done.func(*args, **self._placed(kwargs))
            for shape, tensor in zip(tree_leaves(done.out), tree_leaves(out), strict=True):
                if _is_shape(shape):
                    made.setdefault(_key(shape), tensor)
        generator.set_state(before)
        return made

    def _generator(self) -> torch.Generator:
        """That of the device's random numbers."""
        if self.device.type == "cuda":
            return torch.get_device_module(self.device).default_generators[self.device.index or 0]
        return torch.default_generator

    def _placed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "device": self.device} if kwargs.get("device") == META else kwargs

    def _like(self, shape: Tensor) -> Tensor:
        return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=self.device)


class _AsOnTheDevice(TorchFunctionMode):
    """What is otherwise for shapes.

    torch.tensor puts values where no operator is seen to bring them: they are brought by one that is. What
    has no values stays on the host. By the device of torch.tensor([]) transformers decides whether weights
    are drawn (get_torch_context_manager_or_global_device), and here they are. And torch.nn.init leaves out
    what looks at the numbers it draws (trunc_normal_, orthogonal_), after it has asked is_meta.
    """

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is FROM_VALUES and torch.device(kwargs.get("device") or "cpu") == META:
            values = func(*args, **{**kwargs, "device": "cpu"})
            return values.to(META) if values.numel() else values
        if func == IS_META:
            callers = [frame.f_globals.get("__name__") for frame, _ in islice(walk_stack(None), 4)]
            self.deferred.left_out |= "torch.nn.init" in callers  # `with device` may stand between
        return func(*args, **kwargs)


def _is_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device == META


def _shapes(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if _is_shape(value)]


def _key(tensor: Tensor) -> int:
    """Of its memory. The tape holds the tensors it knows, so that no other gets the same."""
    return tensor.untyped_storage()._cdata


def _view(whole: Tensor, shape: Tensor) -> Tensor:
    """The part of the memory of `whole` that `shape` is of its own."""
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
