"""An out-of-memory in a recording: what was asked for, and what the allocator had left.

Imports no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.allocator import (
    kLargeBuffer,
    kMinLargeAlloc,
    kRoundLarge,
    kSmallBuffer,
    kSmallSize,
    parse_settings,
)
from harness.errors import InputError
from harness.snapshot.segments import free_stretches, pieces_in_use, segments_at
from harness.snapshot.spans import AllocationSpan, Frame
from harness.units import in_gib, round_up


@dataclass(frozen=True)
class OutOfMemory:
    """The last `oom` entry of a trace, and the allocator's state at that moment. Sizes are bytes."""

    index: int
    """Which entry of the trace it is."""
    times: int
    """How many `oom` entries the trace has: a program may try again with less."""
    requested_bytes: int
    device_free_bytes: int
    """What the driver had left, after the allocator had given back the segments that were wholly free."""
    reserved_bytes: int
    allocated_bytes: int
    in_pieces_bytes: int
    """Free bytes within those segments that serve requests of this size."""
    largest_piece_bytes: int
    expandable_segments: bool
    frames: Sequence[Frame]

    @property
    def free_in_segments_bytes(self) -> int:
        """Reserved and not allocated, whatever sizes of request it could serve."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def needed_bytes(self) -> int:
        """The segment that the allocator would have taken from the device for it (get_allocation_size)."""
        if self.requested_bytes <= kSmallSize:
            return kSmallBuffer
        if self.requested_bytes < kMinLargeAlloc:
            return kLargeBuffer
        return round_up(self.requested_bytes, kRoundLarge)

    @property
    def fragmented(self) -> bool:
        """Whether the free pieces and what the device had left would have been enough together."""
        return self.device_free_bytes + self.in_pieces_bytes >= self.requested_bytes

    @property
    def missing_bytes(self) -> int:
        """What was missing even with all free pieces together; 0 where these would have been enough."""
        return max(0, self.requested_bytes - self.device_free_bytes - self.in_pieces_bytes)


def out_of_memory(
    trace: Sequence[Mapping[str, Any]],
    spans: Sequence[AllocationSpan],
    segments: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> OutOfMemory | None:
    """The last out-of-memory of one device's trace; None if it has none.

    `spans` are those of the trace, `segments` the device's after its last entry, `settings` the snapshot's
    allocator_settings.
    """
    indices = [i for i, entry in enumerate(trace) if entry["action"] == "oom"]
    if not indices:
        return None
    index, entry = indices[-1], trace[indices[-1]]
    used = pieces_in_use(segments_at(trace, segments, index), [span for span in spans if span.live_at(index)])
    serving = [
        free
        for segment, pieces in used
        for free in free_stretches(segment, pieces)
        if (segment.kind != "small") == (entry["size"] > kSmallSize) or segment.kind == "expandable"
    ]
    return OutOfMemory(
        index=index,
        times=len(indices),
        requested_bytes=entry["size"],
        device_free_bytes=entry["device_free"],
        reserved_bytes=sum(segment.size_bytes for segment, _ in used),
        allocated_bytes=sum(piece.size_bytes for _, pieces in used for piece in pieces),
        in_pieces_bytes=sum(serving),
        largest_piece_bytes=max(serving, default=0),
        expandable_segments=_expandable(settings),
        frames=entry.get("frames", ()),
    )


def _expandable(settings: Mapping[str, Any]) -> bool:
    stated = settings.get("expandable_segments")
    if isinstance(stated, bool):
        return stated
    try:
        return parse_settings(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")).expandable_segments
    except InputError:
        return False


def oom_in_words(oom: OutOfMemory) -> list[str]:
    """What happened and what the allocator had, a sentence each."""
    times = f" for the last of {oom.times} times" if oom.times > 1 else ""
    asked, left = in_gib(oom.requested_bytes), in_gib(oom.device_free_bytes)
    free = f"{in_gib(oom.free_in_segments_bytes)} free"
    if oom.free_in_segments_bytes:
        free += f"; the largest free piece for such a request was {in_gib(oom.largest_piece_bytes)}"
    reserved, allocated = in_gib(oom.reserved_bytes), in_gib(oom.allocated_bytes)
    return [
        f"Memory ran out{times}: {asked} were asked for, and the device had {left} left.",
        f"PyTorch held {reserved} in segments, {allocated} of it allocated and {free}.",
    ]


def remedy(oom: OutOfMemory) -> str:
    """What would help, as far as the allocator's state says."""
    if oom.device_free_bytes >= oom.needed_bytes:
        return (
            "The device had room: a limit of the process (torch.cuda.set_per_process_memory_fraction, or "
            "per_process_memory_fraction in the allocator's settings) refused it. Raise the limit."
        )
    if not oom.fragmented:
        joined = " even with every free piece joined" if oom.in_pieces_bytes else ""
        return (
            f"{in_gib(oom.missing_bytes)} were missing{joined}: no setting of the allocator finds them. "
            "Less must be allocated at this moment."
        )
    free = in_gib(oom.device_free_bytes + oom.in_pieces_bytes)
    if oom.expandable_segments:
        return (
            f"{free} were free in all, in pieces, although expandable_segments is on: memory of another "
            "stream or pool cannot be taken. Less must be allocated at this moment, or on one stream."
        )
    return (
        f"{free} were free in all, enough if they were in one piece: set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which maps the pages of free pieces together."
    )
