"""The stacks of a recording as one call tree: they share their outer frames. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.snapshot import Frame, stack_line

ROOT = 0
MOST_LINES = 200
"""Shown of one stack: deeper than any training calls, short enough for a page."""

_PLUMBING = re.compile(
    r"harness/(?:__main__\.py|(?:cli|answers|measure|simulate|observe|system|sweep|virtual_gpu)/|training/loop\.py)"
    r"|(?:typer/|click/|runpy\.py|<frozen runpy>|<string>)|(?:\S*/)?bin/harness:"
)
"""Frames of whoever runs the step, who allocate nothing of it: the commands, the loop, the measuring."""


class CallTree:
    """Node 0 is the root. A stack is the node of its innermost frame; `parents` lead to the outermost."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """Every different `file:line function`, once."""
        self.line_of: list[int] = [-1]
        """The line of each node."""
        self.parents: list[int] = [ROOT]
        self._plumbing: list[bool] = []
        self._line_index: dict[str, int] = {}
        self._children: dict[tuple[int, int], int] = {}
        self._known: dict[int, tuple[Sequence[Frame], int]] = {}
        self._line_of_frame: dict[int, tuple[Mapping[str, Any], int]] = {}

    def node_of(self, frames: Sequence[Frame]) -> int:
        """The node of a stack, innermost frame first. The root for one without frames."""
        known = self._known.get(id(frames))
        if known is not None:
            return known[1]
        node = ROOT
        for frame in reversed(frames):
            line = self._line(frame)
            if self._plumbing[line]:
                continue
            key = node, line
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = len(self.parents)
                self.parents.append(node)
                self.line_of.append(line)
            node = child
        self._known[id(frames)] = frames, node  # with the frames: while they live, their id is theirs
        return node

    def stack(self, node: int) -> list[str]:
        """The lines of a node's stack, innermost first, at most MOST_LINES."""
        lines: list[str] = []
        while node != ROOT and len(lines) < MOST_LINES:
            lines.append(self.lines[self.line_of[node]])
            node = self.parents[node]
        return lines

    def _line(self, frame: Frame) -> int:
        known = self._line_of_frame.get(id(frame))
        if known is not None:
            return known[1]
        text = stack_line(frame)
        line = self._line_index.setdefault(text, len(self.lines))
        if line == len(self.lines):
            self.lines.append(text)
            self._plumbing.append(_PLUMBING.match(text) is not None)
        self._line_of_frame[id(frame)] = frame, line
        return line
