"""A stack as people read it: the line that asked for the memory."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.snapshot.spans import Frame

# Profiles are shared: what stays of a path is the part that means the same on another machine.
_INSTALL_FOLDER = re.compile(r"^.*/(?:(?:site-packages|dist-packages|python3\.\d+)/|(?=harness/))")


_TORCH = re.compile(r"/torch/|/harness/virtual_gpu/")  # the virtual GPU's code stands in PyTorch's place


def stack_line(frame: Frame) -> str:
    """`file:line function`, the file without the folders above its package."""
    return f"{_INSTALL_FOLDER.sub('', frame['filename'])}:{frame['line']} {frame['name']}"


NO_STACK = "(no Python stack)"
"""CUDA's backward runs in autograd's own thread, which has none."""


def place_of(frames: Sequence[Frame]) -> str:
    """`file:line function` of the innermost Python frame outside torch, or of the innermost one."""
    python = python_frames(frames)
    outside = (frame for frame in python if not _TORCH.search(frame["filename"]))
    frame = next(outside, python[0] if python else None)
    return NO_STACK if frame is None else line_of(frame)


def python_frames(frames: Sequence[Frame]) -> list[Frame]:
    """Without the C++ frames that torch records when it is asked for all stacks."""
    return [frame for frame in frames if frame["filename"].endswith(".py")]


def line_of(frame: Frame) -> str:
    folder, _, file = frame["filename"].rpartition("/")
    package = folder.rpartition("/")[2]
    return f"{package}/{file}:{frame['line']} {frame['name'].rpartition('.')[2]}"
