"""The stacks of a recording as one call tree, in which they share their outer frames. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness.snapshot import Frame, stack_line

ROOT = 0
"""The node of a stack without frames."""
MOST_LINES = 200
"""The most lines of a stack that are shown: more than a training has, and few enough for a page."""

_PLUMBING = re.compile(
    r"harness/(?:__main__\.py|(?:cli|answers|measure|simulate|observe|system|sweep|virtual_gpu)/|training/loop\.py)"
    r"|(?:typer/|click/|runpy\.py|<frozen runpy>|<string>)|(?:\S*/)?bin/harness:"
    r"|\?\?:|\S+\.(?:c|cc|cpp|cu|h|hpp):\d"
)
"""Frames that are left out: those of harness that call the training step and allocate nothing themselves, and
those of C++, dozens for each allocation where a program records them too."""


class CallTree:
    """A tree of frames. A stack is the node of its innermost frame, whose parents are the callers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        """Every different `file:line function`, once."""
        self.line_of: list[int] = [-1]
        """The line of each node, as an index of `lines`; -1 for the root."""
        self.parents: list[int] = [ROOT]
        """The parent of each node."""
        self._plumbing: list[bool] = []
        """For each line, whether its frames are left out."""
        self._line_index: dict[str, int] = {}
        self._children: dict[tuple[int, int], int] = {}
        """The child of a node that has a certain line."""
        self._known: dict[int, tuple[Sequence[Frame], int]] = {}
        """The node of a stack by the id of its frames, which are kept so that the id stays theirs."""
        self._line_of_frame: dict[int, tuple[Mapping[str, Any], int]] = {}
        """The line of a frame by the frame's id, with the frame for the same reason."""

    def node_of(self, frames: Sequence[Frame]) -> int:
        """The node of a stack, whose frames are innermost first; the root for one without frames."""
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
        self._known[id(frames)] = frames, node
        return node

    def stack(self, node: int) -> list[str]:
        """The lines of a node's stack, innermost first, at most MOST_LINES."""
        lines: list[str] = []
        while node != ROOT and len(lines) < MOST_LINES:
            lines.append(self.lines[self.line_of[node]])
            node = self.parents[node]
        return lines

    def _line(self, frame: Frame) -> int:
        """The line of a frame, as an index of `lines`."""
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
