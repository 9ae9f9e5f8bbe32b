"""Compares what two snapshots hold: what is new, gone, grown or shrunk, by category and by requesting stack.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from harness.snapshot.recording import Recording
from harness.snapshot.stacks import NO_STACK, own_place, place, stack_line

UNKNOWN = "(unknown)"
"""The category of memory for which the recording has none."""


class Holder(NamedTuple):
    """Who holds memory: a category, and the lines of a stack, innermost first."""

    category: str
    stack: tuple[str, ...]
    place: str
    """The one line of the stack that names the holder in a table."""


@dataclass(frozen=True)
class Amount:
    """How much a holder holds: bytes, in so many allocations."""

    total_bytes: int
    count: int


NOTHING = Amount(0, 0)


@dataclass(frozen=True)
class Change:
    """What one holder had in the first snapshot and has in the second."""

    holder: Holder
    before: Amount
    after: Amount

    @property
    def bytes(self) -> int:
        """How many bytes more it has than before; negative for fewer."""
        return self.after.total_bytes - self.before.total_bytes

    @property
    def kind(self) -> str:
        """One of new, gone, grown, shrunk and same."""
        if not self.before.count:
            return "new"
        if not self.after.count:
            return "gone"
        return "grown" if self.bytes > 0 else "shrunk" if self.bytes < 0 else "same"


@dataclass(frozen=True)
class HeldDiff:
    """Every holder of either snapshot, the largest changes first."""

    changes: list[Change]

    def of_kind(self, kind: str) -> list[Change]:
        """The changes of one `Change.kind`."""
        return [change for change in self.changes if change.kind == kind]

    @property
    def before_bytes(self) -> int:
        return sum(change.before.total_bytes for change in self.changes)

    @property
    def after_bytes(self) -> int:
        return sum(change.after.total_bytes for change in self.changes)

    def by_category(self) -> dict[str, tuple[int, int]]:
        """Bytes before and after, the largest changes first."""
        sizes: dict[str, tuple[int, int]] = {}
        for change in self.changes:
            before, after = sizes.get(change.holder.category, (0, 0))
            sizes[change.holder.category] = (
                before + change.before.total_bytes,
                after + change.after.total_bytes,
            )
        return dict(sorted(sizes.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])))

    def as_json(self) -> dict[str, Any]:
        """The comparison as plain data for JSON, without the holders that did not change."""
        return {
            "before_bytes": self.before_bytes,
            "after_bytes": self.after_bytes,
            "by_category": {
                name: {"before_bytes": before, "after_bytes": after}
                for name, (before, after) in self.by_category().items()
            },
            "changes": [
                {
                    "kind": change.kind,
                    **change.holder._asdict(),
                    "bytes": change.bytes,
                    "before": asdict(change.before),
                    "after": asdict(change.after),
                }
                for change in self.changes
                if change.kind != "same"
            ],
        }


def holders_of(recording: Recording) -> list[Holder]:
    """Who holds each of the recording's spans, in their order."""
    categories = recording.categories or [None] * len(recording.spans)
    line_of: dict[int, str] = {}  # of a frame: millions of stacks share some thousands
    places: dict[tuple[str, ...], str] = {}
    known: dict[tuple[str | None, int], Holder] = {}
    holders: list[Holder] = []
    for span, category in zip(recording.spans, categories, strict=True):
        key = category, id(span.frames)
        if key not in known:
            for frame in span.frames:
                if id(frame) not in line_of:
                    line_of[id(frame)] = stack_line(frame)
            lines = tuple(line_of[id(frame)] for frame in span.frames)
            if lines not in places:
                places[lines] = (own_place(span.frames) or place(span.frames)) if lines else NO_STACK
            known[key] = Holder(category or UNKNOWN, lines, places[lines])
        holders.append(known[key])
    return holders


def held_at(recording: Recording, moment: int) -> dict[Holder, Amount]:
    """What is live right after entry `moment` of the trace (-1: before the first), by who holds it."""
    held: dict[Holder, Amount] = {}
    for span, holder in zip(recording.spans, holders_of(recording), strict=True):
        if span.live_at(moment):
            so_far = held.get(holder, NOTHING)
            held[holder] = Amount(so_far.total_bytes + span.size_bytes, so_far.count + 1)
    return held


def diff_held(before: Mapping[Holder, Amount], after: Mapping[Holder, Amount]) -> HeldDiff:
    """Compare what two snapshots hold, holder by holder."""
    changes = [
        Change(holder, before.get(holder, NOTHING), after.get(holder, NOTHING))
        for holder in dict.fromkeys((*before, *after))
    ]
    return HeldDiff(sorted(changes, key=lambda change: (-abs(change.bytes), change.holder)))
