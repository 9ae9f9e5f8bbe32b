"""Writes a tree of dicts, lists, tensors and plain values as named tensors and a JSON document, without
pickle.

An optimizer's state_dict is such a tree. Reading it back runs nothing and imports nothing.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

PLAIN = (str, int, bool, type(None))


def take_apart(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """`tree` as a document for JSON, with a name in the place of every tensor; and the tensors, on the CPU.

    A tensor that is in several places (bitsandbytes' code table) is kept once. Raises TypeError for a value
    that is neither plain, nor a tensor, nor a dict, list or tuple of such.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()

    def alone(tensor: Tensor) -> Tensor:
        """The tensor on the CPU, with a storage of its own, as safetensors requires it."""
        on_cpu = tensor.detach().cpu().contiguous()
        storage = on_cpu.untyped_storage()
        if storage.nbytes() != on_cpu.nbytes or storage.data_ptr() in storages:
            on_cpu = on_cpu.clone()
        storages.add(on_cpu.untyped_storage().data_ptr())
        return on_cpu

    def apart(value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.dtype, value.shape, value.stride())
            if value.numel() == 0 or key not in names:
                while path in tensors:  # a key with a dot in it
                    path += "'"
                names[key] = path
                tensors[path] = alone(value)
            return {"tensor": names[key]}
        if isinstance(value, dict):
            return {"dict": [[key, apart(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [apart(item, f"{path}.{n}") for n, item in enumerate(value)]}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, PLAIN):
            return value
        raise TypeError(f"{path}: a {type(value).__name__} has no place in a checkpoint")

    return apart(tree, "state"), tensors


def put_together(document: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `take_apart` was given. Raises ValueError or KeyError for anything it did not write."""
    if not isinstance(document, dict):
        if isinstance(document, (*PLAIN, float)):
            return document
        raise ValueError(f"a bare {type(document).__name__}")
    [(kind, value)] = document.items()
    match kind:
        case "tensor":
            return tensors[value]
        case "dict":
            return {key: put_together(item, tensors) for key, item in value}
        case "list":
            return [put_together(item, tensors) for item in value]
        case "tuple":
            return tuple(put_together(item, tensors) for item in value)
        case "float":
            return float(value)
    raise ValueError(f"an unknown kind {kind}")
