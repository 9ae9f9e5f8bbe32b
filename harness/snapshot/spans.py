"""One allocation, from the event that makes it to the event that frees it. Recordings are made of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEFORE_RECORDING = -1
Frame = Mapping[str, Any]
"""One line of a stack: filename, line, name (as torch.cuda.memory._snapshot() gives it)."""


@dataclass(slots=True)
class AllocationSpan:
    """One allocation: born when it is made, dead when it is freed. `born` and `died` are indices of the
    recording's events, counted from 0.
    """

    address: int
    size_bytes: int
    born: int
    """BEFORE_RECORDING for memory from before the recording."""
    died: int | None = None
    """None for memory that is still live at the end."""
    birth_phase: str | None = None
    death_phase: str | None = None
    """The phases of the step in which it was made and freed; None where they are not known."""
    category: str | None = None
    """One of step_profile's CATEGORIES where the owner is known (parameters, gradients, ...), else None."""
    module: str | None = None
    operator: str | None = None
    """The module that it belongs to and the operator that made it, where the recording knows them."""
    element_bytes: int = 0
    """Bytes of one number of the tensor that it was made for; 0 where that is not known."""
    frames: Sequence[Frame] = ()
    """Innermost first. Spans with the same stack should share one list: snapshots store it once."""

    def live_at(self, index: int) -> bool:
        """Whether the allocation is live right after event `index`."""
        return self.born <= index and (self.died is None or self.died > index)
