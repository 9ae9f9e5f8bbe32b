"""Arithmetic on one number or on many at once, so that the function that is fitted is the one that is used.

Estimates calculate with floats (SCALARS), the fit with numpy's arrays, through the same five functions.
"""

import math
from types import SimpleNamespace
from typing import Any, Protocol


class Numbers(Protocol):
    """What the formulas need beyond + - * / **. Numbers are floats, or arrays of one length."""

    def ceil(self, x: Any, /) -> Any: ...
    def exp(self, x: Any, /) -> Any: ...
    def log(self, x: Any, /) -> Any: ...
    def minimum(self, x: Any, y: Any, /) -> Any: ...
    def maximum(self, x: Any, y: Any, /) -> Any: ...


def _ceil(x: float) -> float:
    return float(math.ceil(x))


_FUNCTIONS: Any = SimpleNamespace(ceil=_ceil, exp=math.exp, log=math.log, minimum=min, maximum=max)
SCALARS: Numbers = _FUNCTIONS
"""The functions on single floats."""
