"""The time that following values takes, which the clock leaves out: on a GPU no program spends it."""

import ctypes
from time import monotonic_ns as now

AT_LEAST_NS = 100_000
"""The clock is told of so much at once, since a call of it takes time itself."""

_go_on = ctypes.CDLL(None).virtual_gpu_go_on
_go_on.argtypes = [ctypes.c_int64]
_go_on.restype = None
_not_told = 0
"""Nanoseconds that the clock has not been told of yet."""


def not_the_programs(nanoseconds):
    """Set the clock back by so much, as if it had not passed: see `virtual_gpu_go_on` in c/clock.c."""
    global _not_told
    _not_told += nanoseconds
    if _not_told >= AT_LEAST_NS:
        _go_on(now() - _not_told)
        _not_told = 0
