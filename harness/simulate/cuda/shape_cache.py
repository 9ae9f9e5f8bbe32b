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
"""Result of an operator that returns memory it was given: it must always run."""
_RESULTS: dict[Any, Any] = {}
"""What results are like, by operator and arguments; and the operator, whose id is in the key. Shapes follow
from shapes alone: the next simulation of this process, of another GPU or toggle, need not run it again."""
_MOST_RESULTS = 20_000
"""Of a few hundred bytes each."""


class Call:
    """An operator on given shapes, dtypes and numbers: what is the same each time it is called on them."""

    __slots__ = ("cost", "key", "result", "script")

    def __init__(self, key: Any = None) -> None:
        self.key = key
        """Of the operator and what it is called on; None where that cannot be a key."""
        self.result: Any = _RESULTS.get(key, (None,))[0]
        """What makes results like the first one, _ALIASES, or None: nothing is known yet."""
        self.script: Sequence[Any] | None = None
        """For who runs the operator to keep: what its CUDA kernel does with the allocator."""
        self.cost: Any = None
        """For who runs the operator to keep: what its CUDA kernel takes of time."""


VIEW = Call()
"""Every call of an operator that looks at its input in another way: nothing is made, nothing is moved."""


class ShapeCache:
    """Runs operators, remembering what shapes come out. Operators whose schema, or whose first run, shows
    that they return memory they were given always run.
    """

    def __init__(self) -> None:
        self._calls: dict[Any, Call] = {}
        self._kinds: dict[int, Kind] = {}
        """By id: operators live as long as torch, and their hash is a Python function."""

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call]:
        """func(*args, **kwargs), and the Call: a new one for arguments that cannot be remembered."""
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
    """The specs of fresh results, or _ALIASES."""
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
    """The tensors among an operator's arguments, in lists too."""
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
