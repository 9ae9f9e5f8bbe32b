"""Running operators on shape-only tensors fast: the same operator on the same shapes gives the same shapes.

Many meta kernels are Python decompositions of 100 us and more, and the layers of a model repeat. The first
call of an operator on given shapes runs it; the next ones make empty tensors like its results. An operator
that only writes values into a tensor has nothing to do.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["view", "pure", "writes", "other"]
_ALIASES = object()
"""Stands for the result of an operator that returns memory it was given: it must always run."""
_RESULTS: dict[Any, Any] = {}
"""By key of a Call: what its results are like, with the operator, which has to live because its id is in the
key. Shapes follow from shapes alone, so that later simulations in this process use them too."""
_MOST_RESULTS = 20_000
"""No more results are kept than this, of a few hundred bytes each."""


class Call:
    """An operator on given shapes, dtypes and numbers: what is the same each time it is called on them."""

    __slots__ = ("cost", "key", "result", "script", "tensors")

    def __init__(self, key: Any = None) -> None:
        self.key = key
        """The operator and the shapes of its arguments; None where an argument cannot be part of a key."""
        self.result: Any = _RESULTS.get(key, (None,))[0]
        """The shapes, strides and dtypes of the results, or _ALIASES; None where it has not run yet."""
        self.script: Sequence[Any] | None = None
        """What its CUDA kernel does with the allocator, kept here by the code that runs operators."""
        self.cost: Any = None
        """The time that its CUDA kernel takes. It is kept here by the code that runs the operator."""
        self.tensors: Any = None
        """Which tensors its CUDA kernel reads and writes. They are kept here by the same code."""


VIEW = Call()
"""Stands for every call of an operator that returns a view: it allocates nothing and moves nothing."""


class ShapeCache:
    """Runs operators, and remembers the shapes of their results. Operators that return memory they were
    given, by their schema or in their first run, always run.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, Call] = {}
        self._kinds: dict[int, Kind] = {}
        """The kind of each operator, by its id: operators live as long as torch, and hashing one is slow."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call]:
        """The result of func(*args, **kwargs), and its Call, a new one if the arguments cannot be a key."""
        kind = self._kinds.get(id(func))
        if kind is None:
            kind = self._kinds[id(func)] = _kind(func)
        if kind == "view":
            return func(*args, **kwargs), VIEW
        call = self._call(func, args, kwargs)
        if kind == "writes" and _on_meta(args[0]):
            return args[0] if func._schema.returns else None, call
        known = call.result
        if kind != "pure" or known is _ALIASES:
            return func(*args, **kwargs), call
        if known is None:
            out = func(*args, **kwargs)
            call.result = _remembered(out, args)
            if call.key is not None and len(_RESULTS) < _MOST_RESULTS:
                _RESULTS[call.key] = call.result, func
            return out, call
        if isinstance(known, list):
            return tuple(_made(spec) for spec in known), call
        return _made(known), call

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
        """The Call of an operator on such arguments: the one of an earlier time, or a new one."""
        try:
            # torch.ones(3) and an integer's quotient have the default dtype, which model code changes
            options = _key(tuple(kwargs.items())) if kwargs else ()
            key = (id(func), torch.get_default_dtype(), _key(args), options)
            known = self._calls.get(key)
        except TypeError:  # a real tensor, or an argument that cannot be a key (a generator)
            return Call()
        if known is None:
            known = self._calls[key] = Call(key)
        return known


def _kind(func: Any) -> Kind:
    """What an operator does by its schema: return a view, make new tensors, write into its first argument and
    nothing else, or something else."""
    schema = func._schema
    if func.is_view:
        return "view"
    if not schema.is_mutable:
        fresh = all(r.alias_info is None and str(r.type) == "Tensor" for r in schema.returns)
        return "pure" if fresh and schema.returns else "other"
    name = schema.name.rpartition("::")[2]
    changes_shape = torch.Tag.inplace_view in func.tags or name in ("set_", "resize_", "resize_as_")
    first = schema.arguments[0].alias_info
    writes_first = name.endswith("_") and first is not None and first.is_write and len(schema.returns) <= 1
    return "writes" if writes_first and not changes_shape else "other"


def _on_meta(value: Any) -> bool:
    first = value[0] if isinstance(value, list | tuple) and value else value
    return isinstance(first, Tensor) and first.is_meta


def _key(values: Any) -> Any:
    """Arguments as a key, with shape, strides and dtype of each tensor. Raises TypeError for a real one."""
    key = []
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                raise TypeError
            key.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            key.append(_key(value))
        elif isinstance(value, int | float | bool):
            key.append((type(value), value))  # 1, 1.0 and True are one key otherwise
        else:
            key.append(value)
    return tuple(key)


def _remembered(out: Any, args: Any) -> Any:
    """The (shape, strides, dtype) of each result, if all are new tensors; otherwise _ALIASES."""
    results = out if isinstance(out, tuple) else (out,)
    given = {a.untyped_storage()._cdata for a in tensors_in(args)}
    storages = [t.untyped_storage()._cdata for t in results if isinstance(t, Tensor)]
    fresh = len(set(storages)) == len(results) and not given & set(storages)
    if not fresh or any(t.device.type != "meta" or not _whole(t) for t in results):
        return _ALIASES
    specs = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
    return specs if isinstance(out, tuple) else specs[0]


def _whole(tensor: Tensor) -> bool:
    """Whether a tensor made from shape and stride alone would have a storage of the same size."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == needed


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments and in lists among them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def _made(spec: Any) -> Tensor:
    shape, stride, dtype = spec
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
