"""What a CUDA kernel does with the caching allocator while it runs, as a list of steps."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Take(NamedTuple):
    """Allocate a temporary of that many bytes. The n-th Take of a script is its temporary n."""

    size_bytes: int
    workspace: bool = False
    """Of a library or a kernel's splits: how much of it is written and read nobody knows."""


class Free(NamedTuple):
    """Free a temporary."""

    temporary: int


class Output(NamedTuple):
    """Allocate the storage of an output: its position in what the operator returns."""

    index: int


class Keep(NamedTuple):
    """Allocate what a library keeps for the calling thread, unless it has it already."""

    library: str
    size_bytes: int


class Unknown(NamedTuple):
    """Nobody has looked at what the kernels take when they are called so."""

    how: str


Step = Take | Free | Output | Keep | Unknown


@dataclass
class Script:
    """Builds a list of steps. A size of 0 bytes is no allocation, in CUDA as here."""

    steps: list[Step] = field(default_factory=list)
    _taken: int = 0

    def take(self, size_bytes: int, *, workspace: bool = False) -> int | None:
        """A temporary; the returned handle goes to `free`."""
        if size_bytes == 0:
            return None
        self.steps.append(Take(size_bytes, workspace))
        self._taken += 1
        return self._taken - 1

    def free(self, *handles: int | None) -> None:
        """Free temporaries in this order."""
        self.steps.extend(Free(handle) for handle in handles if handle is not None)

    def briefly(self, size_bytes: int, *, workspace: bool = False) -> None:
        """A temporary that is freed before anything else is allocated."""
        self.free(self.take(size_bytes, workspace=workspace))

    def output(self, *indices: int) -> None:
        """The storages of these outputs, in this order."""
        self.steps.extend(Output(index) for index in indices)

    def unknown(self, how: str) -> None:
        """Say that nobody has looked at the operator when it is called so."""
        self.steps.append(Unknown(how))

    def keep(self, library: str, size_bytes: int) -> None:
        """What a library keeps for the calling thread."""
        if size_bytes:
            self.steps.append(Keep(library, size_bytes))


def size_of(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Bytes of a contiguous copy of `tensor`, in its own dtype unless told."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize
