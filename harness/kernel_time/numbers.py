"""Arithmetic on one number or on many at once, so that the function that is fitted is the one that is used.

Estimates calculate with floats (`Scalars`), the fit with numpy's arrays, through the same five functions.
"""

import math
from typing import Any, Protocol


class Numbers(Protocol):
    """What the formulas need beyond + - * / **. Numbers are floats, or arrays of one length."""

    def ceil(self, x: Any, /) -> Any: ...
    def exp(self, x: Any, /) -> Any: ...
    def log(self, x: Any, /) -> Any: ...
    def minimum(self, x: Any, y: Any, /) -> Any: ...
    def maximum(self, x: Any, y: Any, /) -> Any: ...


class Scalars:
    """The functions on single floats."""

    @staticmethod
    def ceil(x: float) -> float:
        return float(math.ceil(x))

    @staticmethod
    def exp(x: float) -> float:
        return math.exp(x)

    @staticmethod
    def log(x: float) -> float:
        return math.log(x)

    @staticmethod
    def minimum(x: float, y: float) -> float:
        return min(x, y)

    @staticmethod
    def maximum(x: float, y: float) -> float:
        return max(x, y)


SCALARS: Numbers = Scalars()
