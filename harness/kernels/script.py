"""What a CUDA kernel does with the caching allocator while it runs, as a list of steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Take(NamedTuple):
    """Allocate a temporary of `size_bytes`. The n-th Take of a script, counted from 0, is temporary n."""

    size_bytes: int
    workspace: bool = False
    """Whether it is a library's or a kernel's staging area, of which it is not known how much is used."""


class Free(NamedTuple):
    """Free the temporary of this number."""

    temporary: int


class Output(NamedTuple):
    """Allocate the storage of the output at position `index` in what the operator returns."""

    index: int


class Keep(NamedTuple):
    """Allocate a workspace that a library keeps for the calling thread, unless the thread has one already."""

    library: str
    size_bytes: int


class Unknown(NamedTuple):
    """Nobody has looked at what the kernels allocate in this kind of call, which `how` describes."""

    how: str


Step = Take | Free | Output | Keep | Unknown


@dataclass
class Script:
    """Builds a list of steps. A size of 0 bytes is no allocation, in CUDA as here."""

    steps: list[Step] = field(default_factory=list)
    _taken: int = 0

    def take(self, size_bytes: int, *, workspace: bool = False) -> int | None:
        """Allocate a temporary. Returns its handle, for `free`; None for 0 bytes."""
        if size_bytes == 0:
            return None
        self.steps.append(Take(size_bytes, workspace))
        self._taken += 1
        return self._taken - 1

    def free(self, *handles: int | None) -> None:
        """Free temporaries in this order."""
        self.steps.extend(Free(handle) for handle in handles if handle is not None)

    def briefly(self, size_bytes: int, *, workspace: bool = False) -> None:
        """Allocate a temporary and free it before anything else is allocated."""
        self.free(self.take(size_bytes, workspace=workspace))

    def output(self, *indices: int) -> None:
        """Allocate the storages of these outputs, in this order."""
        self.steps.extend(Output(index) for index in indices)

    def unknown(self, how: str) -> None:
        """Note that nobody has looked at this kind of call, which `how` describes."""
        self.steps.append(Unknown(how))

    def keep(self, library: str, size_bytes: int) -> None:
        """Allocate a library's workspace of the calling thread, which it keeps."""
        if size_bytes:
            self.steps.append(Keep(library, size_bytes))


def size_of(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a contiguous copy of `tensor`, in `dtype` or else in its own."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def present(outputs: Sequence[Any]) -> list[int]:
    """The positions of the outputs that are returned; the others are None."""
    return [i for i, value in enumerate(outputs) if isinstance(value, Tensor)]
