"""A stack as people read it: the line that asked for the memory."""

import re
from collections.abc import Sequence

from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan, Frame

# Profiles are shared: what stays of a path is the part that means the same on another machine.
_INSTALL_FOLDER = re.compile(r"^.*/(?:(?:site-packages|dist-packages|python3\.\d+)/|(?=harness/))")


_AUTOGRAD_NODE = re.compile(r" torch::autograd::(?:generated::)?(\w+)::apply\(")
_LIBRARY = re.compile(r"/(?:site-packages|dist-packages|python3\.\d+|harness/virtual_gpu)/|^<frozen ")
_TORCH = re.compile(r"/torch/|/harness/virtual_gpu/")  # the virtual GPU's code stands in PyTorch's place


def stack_line(frame: Frame) -> str:
    """`file:line function`, the file without the folders above its package."""
    return f"{_INSTALL_FOLDER.sub('', frame['filename'])}:{frame['line']} {frame['name']}"


_FSDP = re.compile(r"/torch/distributed/fsdp/_fully_shard/(\w+)\.py$")
_GATHERS = {
    "_fsdp_param": ("alloc_storage", "init_all_gather_outputs"),
    "_fsdp_collectives": ("foreach_all_gather",),
}
"""FSDP2's functions, by file, that ask for whole weights and for the output of their all-gather."""


def gathers(frames: Sequence[Frame]) -> bool:
    """Whether FSDP2 gathers weights here, by its innermost functions (torch 2.11 to 2.15)."""
    for frame in frames:
        of_fsdp = _FSDP.search(frame["filename"])
        if of_fsdp is not None:
            if frame["name"].rpartition(".")[2] in _GATHERS.get(of_fsdp[1], ()):
                return True
        elif frame["filename"].endswith(".py"):
            return False
    return False


NO_STACK = "(no Python stack)"
"""Stands for the line of an allocation without one: CUDA's backward runs in autograd's own thread."""


def without_stack(span: AllocationSpan, category: str) -> str:
    """Words for where an allocation comes from that was recorded without a stack."""
    if span.born == BEFORE_RECORDING:
        words = "there before the recording"
        return f"a library's workspace, say, {words}" if category == "other" else words
    if span.birth_phase == "backward":
        return "made by autograd in backward"
    return "made by a library, outside Python"


def place_of(frames: Sequence[Frame]) -> str:
    """`file:line function` of the innermost Python frame outside torch, or of the innermost one."""
    python = python_frames(frames)
    outside = (frame for frame in python if not _TORCH.search(frame["filename"]))
    frame = next(outside, python[0] if python else None)
    return NO_STACK if frame is None else line_of(frame)


def python_frames(frames: Sequence[Frame]) -> list[Frame]:
    """The Python frames alone, without the C++ frames that torch records when it is asked for all stacks."""
    return [frame for frame in frames if frame["filename"].endswith(".py")]


def line_of(frame: Frame) -> str:
    """`folder/file.py:line function`, with the innermost folder alone and the function without its class."""
    folder, _, file = frame["filename"].rpartition("/")
    package = folder.rpartition("/")[2]
    return f"{package}/{file}:{frame['line']} {frame['name'].rpartition('.')[2]}"


def readable(line: str) -> str | None:
    """A line of a stack for a Python programmer: a Python line as it is, a C++ line as the autograd node that
    it runs; None for other C++ lines.
    """
    if ".py:" in line:
        return line
    node = _AUTOGRAD_NODE.search(line)
    return f"autograd: {node[1]}" if node else None


def place(frames: Sequence[Frame]) -> str:
    """The innermost Python frame outside torch; in autograd's own thread, which has none, its node."""
    found = place_of(frames)
    if found != NO_STACK:
        return found
    return next(filter(None, map(readable, map(stack_line, frames))), NO_STACK)


def is_library(frame: Frame) -> bool:
    """Whether a Python frame is an installed package's, the standard library's or the virtual GPU's."""
    return _LIBRARY.search(frame["filename"]) is not None


def own_place(frames: Sequence[Frame]) -> str | None:
    """The innermost line outside libraries, as `place` writes it; None where every frame is a library's."""
    frame = next((frame for frame in python_frames(frames) if not is_library(frame)), None)
    return None if frame is None else place_of([frame])
