"""Finds what memory ran out for: the requesting line of the model or program, and a tensor of that size."""

import re
import traceback
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from harness.system import PACKAGE

_PLUMBING = re.compile(
    rf"(?:{re.escape(str(PACKAGE))}|{re.escape(str(Path(torch.__file__).parent))})/"
    r"|.*/python3\.\d+/(?!(?:site|dist)-packages/)|<"
)
"""Files whose frames do not say what was asked for: PyTorch's, ours, Python's."""
_WRAPPERS = re.compile(r".*/(?:site|dist)-packages/(?:accelerate|bitsandbytes|peft)/")
"""Files of libraries that stand around a model's modules: which module it was, the line that called says."""
_ABOVE_PACKAGE = re.compile(r"^.*/(?:site|dist)-packages/")
_OTHER_DTYPES = {8: "fp64", 4: "fp32", 2: "16 bit", 1: "8 bit"}
"""Names for dtypes by bytes of a number, where the request is as large as a tensor in another dtype."""
_ROUNDED_TO = 2**21
"""A large request may be less than this larger than its tensor: the allocator asks for whole pages."""


def failed_request(error: BaseException, requested_bytes: int | None) -> dict[str, Any]:
    """What was requested, as fields of an OutOfMemoryReport, from the frames of `error`'s traceback.

    `transformers/loss/loss_utils.py:61 ForCausalLMLoss` is the innermost frame outside PyTorch, with the
    line that called it where it is a wrapper's, and `as large as logits in fp32: 4 × 4,096 × 151,936 × 4 B` a
    tensor that it, or what it called, has by a name.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    files = [frame.f_code.co_filename for frame, _ in frames]
    outside = [index for index, file in enumerate(files) if not _PLUMBING.match(file)]
    if not outside:
        return {"requested_bytes": requested_bytes}
    inner = outside[-1]
    model = next((index for index in reversed(outside) if not _WRAPPERS.match(files[index])), inner)
    places = [_place(*frames[index]) for index in sorted({inner, model}, reverse=True)]
    scopes = [called.f_locals for called, _ in frames[inner:]]
    found = (words for variables in scopes for words in _as_large(variables, requested_bytes or 0))
    return {
        "requested_bytes": requested_bytes,
        "requested_is": next(found, None),
        "requested_at": ", called from ".join(places),
    }


def _place(frame: FrameType, line: int) -> str:
    """`peft/tuners/lora/layer.py:1113 forward`: a file below its package, or its name where it is in none."""
    file = frame.f_code.co_filename
    file = _ABOVE_PACKAGE.sub("", file) if _ABOVE_PACKAGE.match(file) else file.rpartition("/")[2]
    return f"{file}:{line} {frame.f_code.co_name}"


def _as_large(variables: Mapping[str, Any], requested_bytes: int) -> Iterator[str]:
    """Words for what has so many bytes in a frame: the output of its Linear, or a tensor in any dtype."""
    module, given = variables.get("self"), variables.get("input")
    if isinstance(module, torch.nn.Linear) and isinstance(given, torch.Tensor):
        shape = [*given.shape[:-1], module.out_features]
        if _is(shape, given.element_size(), requested_bytes):
            spelled = _spelled(shape, given.element_size())
            yield f"output of a Linear of {module.in_features:,} to {module.out_features:,}: {spelled}"
    for name, value in variables.items():
        if isinstance(value, torch.Tensor):
            own = value.element_size()
            for width in (own, *(other for other in _OTHER_DTYPES if other != own)):
                if _is(value.shape, width, requested_bytes):
                    dtype = str(value.dtype).removeprefix("torch.") if width == own else _OTHER_DTYPES[width]
                    yield f"as large as {name} in {dtype}: {_spelled(value.shape, width)}"


def _is(shape: Any, width: int, requested_bytes: int) -> bool:
    """Whether a request of so many bytes may be for this shape with numbers of `width` bytes."""
    more_bytes = requested_bytes - prod(shape) * width
    return 0 <= more_bytes < min(_ROUNDED_TO, requested_bytes / 8)


def _spelled(shape: Any, width: int) -> str:
    return " × ".join(f"{size:,}" for size in shape) + f" × {width} B"
