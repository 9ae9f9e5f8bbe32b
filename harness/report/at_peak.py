"""What the peak is made of: by module path, by calling code, and the allocations one kind at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.report.history import History
from harness.report.stacks import ROOT
from harness.report.table import Cell, Table
from harness.snapshot import (
    AS_LARGE,
    BEFORE_RECORDING,
    NO_STACK,
    AllocationSpan,
    module_of_its_kind,
    own_place,
    place,
    readable,
    without_stack,
)
from harness.step_profile import StepProfile

SMALLEST_SHARE = 1 / 2000
"""Of the peak: what is smaller is not drawn by itself."""
MOST_KINDS = 300


@dataclass
class Icicle:
    """Boxes in boxes: `parents` are indices, -1 for the whole; a value holds those inside it."""

    labels: list[str] = field(default_factory=list[str])
    parents: list[int] = field(default_factory=list[int])
    bytes: list[int] = field(default_factory=list[int])

    def add(self, label: str, parent: int, size_bytes: int) -> int:
        """Returns the new box's index."""
        self.labels.append(label)
        self.parents.append(parent)
        self.bytes.append(size_bytes)
        return len(self.labels) - 1


class Kind(NamedTuple):
    """Allocations at the peak that came from one stack, of one group and phase."""

    total_bytes: int
    num_allocations: int
    largest_bytes: int
    group: str
    phase: str | None
    place: str
    called_from: str | None
    """The innermost line of the program's own, where `place` is a library's."""
    module: str | None
    stack: list[str]


def by_module(at_peak_by_module: Mapping[str, int]) -> Icicle:
    """StepProfile's bytes by module path, each module inside the one that holds it.

    Modules of one kind, which differ in a number of their paths, are one: `layers.* × 32`.
    """
    totals: dict[tuple[str, ...], int] = {}
    alike: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path, size in at_peak_by_module.items():
        parts = (path,) if path.startswith("(") else tuple(path.split("."))
        kind = tuple("*" if part.isdigit() else part for part in parts)
        for depth in range(len(parts) + 1):
            totals[kind[:depth]] = totals.get(kind[:depth], 0) + size
            if kind[depth - 1 : depth] == ("*",) and parts[depth - 1] != "*":
                alike.setdefault(kind[:depth], set()).add(parts[:depth])
    icicle = Icicle()
    index: dict[tuple[str, ...], int] = {}
    for parts in sorted(totals, key=lambda parts: (len(parts), -totals[parts], parts)):
        if totals[parts] < SMALLEST_SHARE * totals[()]:
            continue
        label = parts[-1] if parts else "peak"
        if len(alike.get(parts, ())) > 1:
            label += f" × {len(alike[parts])}"
        parent = index[parts[:-1]] if parts else -1
        if len(parts) > 1 and totals[parts] == totals[parts[:-1]]:  # the only thing in it: one box for both
            icicle.labels[parent] += f".{label}"
            index[parts] = parent
        else:
            index[parts] = icicle.add(label, parent, totals[parts])
    return icicle


def by_code(history: History) -> Icicle:
    """The bytes live at the moment by the code that allocated them, callers outside, Python frames only.

    What has no stack (parameters, mostly) is there by its group, why, and the kind of its module.
    """
    event, peak_bytes = history.moment()
    tree = history.tree
    totals = [0] * len(tree.parents)
    for span in history.live_at(event):
        totals[tree.node_of(span.frames)] += span.size_bytes
    unknown: dict[str, dict[str, int]] = {}
    groups: dict[int, int] = dict(zip(map(id, history.spans), history.group_of_span.tolist(), strict=True))
    for span in history.live_at(event):
        if tree.node_of(span.frames) == ROOT:
            category = history.groups[groups[id(span)]]
            of_group = unknown.setdefault(f"{category}, {without_stack(span, category)}", {})
            name = module_of_its_kind(span.module or "")
            of_group[name] = of_group.get(name, 0) + span.size_bytes
    children: list[list[int]] = [[] for _ in tree.parents]
    for node in range(len(tree.parents) - 1, ROOT, -1):  # a parent is older than its children
        totals[tree.parents[node]] += totals[node]
        children[tree.parents[node]].append(node)
    icicle = Icicle()
    waiting = [(ROOT, icicle.add("peak" if history.when == "at the peak" else "all", -1, peak_bytes))]
    for group, sizes in sorted(unknown.items(), key=lambda item: -sum(item[1].values())):
        box = icicle.add(group, 0, sum(sizes.values()))
        for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
            if name and size >= SMALLEST_SHARE * peak_bytes:
                icicle.add(name, box, size)
    while waiting:
        node, box = waiting.pop()
        for child in sorted(children[node], key=lambda child: -totals[child]):
            if totals[child] < SMALLEST_SHARE * peak_bytes:
                continue
            line = readable(tree.lines[tree.line_of[child]])
            # A frame that allocates all its caller does would be one more row of the same.
            if line is not None and totals[child] != icicle.bytes[box]:
                waiting.append((child, icicle.add(line, box, totals[child])))
            else:
                waiting.append((child, box))
    return icicle


def kinds(history: History | None, profile: StepProfile | None) -> list[Kind]:
    """The allocations at the peak, the most bytes first. Without a history, the profile's largest ones."""
    if history is None:
        return [_of_profile(allocation) for allocation in profile.top] if profile else []
    event, _ = history.moment()
    found: dict[tuple[Any, ...], list[AllocationSpan]] = {}
    groups = dict(zip(map(id, history.spans), history.group_of_span.tolist(), strict=True))
    for span in history.live_at(event):
        node = history.tree.node_of(span.frames)
        key = (
            node,
            module_of_its_kind(span.module)
            if span.module and (node == ROOT or span.module.startswith(AS_LARGE))
            else None,
            groups[id(span)],
            span.birth_phase,
            span.born == BEFORE_RECORDING,
        )
        found.setdefault(key, []).append(span)
    ordered = sorted(found.items(), key=lambda item: -sum(span.size_bytes for span in item[1]))
    return [
        Kind(
            total_bytes=sum(span.size_bytes for span in spans),
            num_allocations=len(spans),
            largest_bytes=max(span.size_bytes for span in spans),
            group=history.groups[group],
            phase=phase,
            place=(where := _place(spans[0], history.groups[int(group)])),
            called_from=own if (own := own_place(spans[0].frames)) != where else None,
            module=module,
            stack=history.tree.stack(node),
        )
        for (node, module, group, phase, _), spans in ordered
    ]


def _place(span: AllocationSpan, group: str) -> str:
    found = place(span.frames)
    return f"({without_stack(span, group)})" if found == NO_STACK else found


def kinds_table(found: Sequence[Kind], when: str = "at the peak") -> Table:
    """The kinds for Markdown and CSV, each named by what it is, its phase and the innermost frame."""
    rows = [
        (
            *(Cell(kind.group), Cell(kind.phase), Cell(kind.module or kind.place)),
            *(
                Cell(kind.total_bytes, "bytes"),
                Cell(kind.num_allocations, "number"),
                Cell(kind.largest_bytes, "bytes"),
            ),
        )
        for kind in found
    ]
    columns = ("what", "allocated in", "where", "bytes", "count", "largest")
    return Table(f"Allocations {when}", columns, rows, keys=3)


def groups_table(history: History) -> Table:
    """The bytes at the moment by what the timeline is stacked by, the most first, and each one's share."""
    _, total = history.moment()
    held = history.held().items()
    rows = [(Cell(name), Cell(size, "bytes"), Cell(size / total, "share")) for name, size in held]
    what = "category" if history.by_category else "code"
    return Table(f"What is allocated {history.when}, by {what}", (what, "bytes", "share"), rows)


def _of_profile(allocation: Any) -> Kind:
    size = allocation.size_bytes
    innermost = allocation.stack[0] if allocation.stack else "-"
    named = (allocation.category, allocation.phase, innermost, None, allocation.module)
    return Kind(size, 1, size, *named, allocation.stack)
