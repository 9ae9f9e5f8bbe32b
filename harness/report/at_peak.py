"""What the memory at the peak consists of: by module, by the code that allocated it, and by kind of
allocation.
"""

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
from harness.step_profile import Allocation, StepProfile

SMALLEST_SHARE = 1 / 2000
"""The share of the peak below which a box is not drawn."""
MOST_KINDS = 300
"""The most kinds of allocations that a report lists."""


@dataclass
class Icicle:
    """The boxes of an icicle chart, each inside its parent, with one entry for each box in every list."""

    labels: list[str] = field(default_factory=list[str])
    parents: list[int] = field(default_factory=list[int])
    """The index of the box around each box; -1 for the outermost."""
    bytes: list[int] = field(default_factory=list[int])
    """The size of each box, which includes those of the boxes inside it."""

    def add(self, label: str, parent: int, size_bytes: int) -> int:
        """Add a box. Returns its index."""
        self.labels.append(label)
        self.parents.append(parent)
        self.bytes.append(size_bytes)
        return len(self.labels) - 1


class Kind(NamedTuple):
    """The allocations at the peak that have one stack, group and phase."""

    total_bytes: int
    num_allocations: int
    largest_bytes: int
    group: str
    """The category, or the place in the code, by which the timeline groups them."""
    phase: str | None
    """The phase in which they were allocated; None where the recording names none."""
    place: str
    """The innermost line of the stack, or why there is no stack."""
    called_from: str | None
    """The innermost line of the user's own program, where `place` is a library's."""
    module: str | None
    stack: list[str]
    """The lines of the stack, innermost first."""


def by_module(at_peak_by_module: Mapping[str, int]) -> Icicle:
    """The bytes at the peak by module path, each module inside the one that holds it.

    Modules whose paths differ only in a number are drawn as one box: `layers.* × 32`.
    """
    totals: dict[tuple[str, ...], int] = {}
    of_one_kind: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path, size in at_peak_by_module.items():
        parts = (path,) if path.startswith("(") else tuple(path.split("."))
        kind = tuple("*" if part.isdigit() else part for part in parts)
        for depth in range(len(parts) + 1):
            totals[kind[:depth]] = totals.get(kind[:depth], 0) + size
            if kind[depth - 1 : depth] == ("*",) and parts[depth - 1] != "*":
                of_one_kind.setdefault(kind[:depth], set()).add(parts[:depth])
    icicle = Icicle()
    index: dict[tuple[str, ...], int] = {}
    for parts in sorted(totals, key=lambda parts: (len(parts), -totals[parts], parts)):
        if totals[parts] < SMALLEST_SHARE * totals[()]:
            continue
        label = parts[-1] if parts else "peak"
        if len(of_one_kind.get(parts, ())) > 1:
            label += f" × {len(of_one_kind[parts])}"
        parent = index[parts[:-1]] if parts else -1
        if len(parts) > 1 and totals[parts] == totals[parts[:-1]]:  # it fills its parent: one box for both
            icicle.labels[parent] += f".{label}"
            index[parts] = parent
        else:
            index[parts] = icicle.add(label, parent, totals[parts])
    return icicle


def by_code(history: History) -> Icicle:
    """The bytes at the report's moment by the code that allocated them: each Python frame inside its caller.

    What has no stack, mostly parameters, is in boxes by its group and the reason, and by module in these.
    """
    event, peak_bytes = history.moment()
    tree = history.tree
    totals = [0] * len(tree.parents)
    for span in history.live_at(event):
        totals[tree.node_of(span.frames)] += span.size_bytes
    without: dict[str, dict[str, int]] = {}  # the bytes without a stack, by group and module
    groups: dict[int, int] = dict(zip(map(id, history.spans), history.group_of_span.tolist(), strict=True))
    for span in history.live_at(event):
        if tree.node_of(span.frames) == ROOT:
            category = history.groups[groups[id(span)]]
            of_group = without.setdefault(f"{category}, {without_stack(span, category)}", {})
            name = module_of_its_kind(span.module or "")
            of_group[name] = of_group.get(name, 0) + span.size_bytes
    children: list[list[int]] = [[] for _ in tree.parents]
    for node in range(len(tree.parents) - 1, ROOT, -1):  # children have larger numbers than their parents
        totals[tree.parents[node]] += totals[node]
        children[tree.parents[node]].append(node)
    icicle = Icicle()
    waiting = [(ROOT, icicle.add("peak" if history.when == "at the peak" else "all", -1, peak_bytes))]
    for group, sizes in sorted(without.items(), key=lambda item: -sum(item[1].values())):
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
            # a frame that allocates all that its caller does gets no box, which would show the same again
            if line is not None and totals[child] != icicle.bytes[box]:
                waiting.append((child, icicle.add(line, box, totals[child])))
            else:
                waiting.append((child, box))
    return icicle


def kinds(history: History | None, profile: StepProfile | None) -> list[Kind]:
    """The kinds of allocations at the report's moment, the most bytes first. Without a history, the largest
    allocations of the profile, each as a kind of its own."""
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
    """The innermost line of an allocation's stack, or in parentheses why it has none."""
    found = place(span.frames)
    return f"({without_stack(span, group)})" if found == NO_STACK else found


def kinds_table(found: Sequence[Kind], when: str = "at the peak") -> Table:
    """The kinds as a table for Markdown and CSV."""
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
    """The bytes at the report's moment by the groups of the timeline, with shares, the most first."""
    _, total = history.moment()
    held = history.held().items()
    rows = [(Cell(name), Cell(size, "bytes"), Cell(size / total, "share")) for name, size in held]
    what = "category" if history.by_category else "code"
    return Table(f"What is allocated {history.when}, by {what}", (what, "bytes", "share"), rows)


def _of_profile(allocation: Allocation) -> Kind:
    """One of the largest allocations of a profile as a kind."""
    size = allocation.size_bytes
    innermost = allocation.stack[0] if allocation.stack else "-"
    origin = (allocation.category, allocation.phase, innermost, None, allocation.module)
    return Kind(size, 1, size, *origin, allocation.stack)
