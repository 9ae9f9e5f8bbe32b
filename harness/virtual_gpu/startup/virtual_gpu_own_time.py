"""The time that following values takes, which the clock leaves out: on a GPU no program spends it."""

import ctypes
from time import monotonic_ns as now

import torch
from virtual_gpu_keys import switched

AT_LEAST_NS = 100_000
"""The clock is told of so much at once, since a call of it takes time itself."""
ROUNDS, CALLS = 5, 50

_go_on = ctypes.CDLL(None).virtual_gpu_go_on
_go_on.argtypes = [ctypes.c_int64]
_go_on.restype = None
_not_told = 0
"""Nanoseconds that the clock has not been told of yet."""
_way_ns = 0
"""What the dispatcher takes to call a kernel in Python and to be called back: see `measure_the_way`."""


def not_the_programs(nanoseconds):
    """Set the clock back by so much, as if it had not passed: see `virtual_gpu_go_on` in c/clock.c."""
    global _not_told
    _not_told += nanoseconds + _way_ns
    if _not_told >= AT_LEAST_NS:
        _go_on(now() - _not_told)
        _not_told = 0


def measure_the_way():
    """Learn how much longer an operator takes where its values are followed, beyond what `not_the_programs`
    is told of it."""
    global _not_told, _way_ns
    number = torch.zeros(1)

    def call():
        for _ in range(CALLS):
            number.add_(number)

    followed, plain = switched(call, True), switched(call, False)
    before, _way_ns, found = _not_told, 0, []
    for _ in range(ROUNDS):
        _not_told = nothing = -AT_LEAST_NS * CALLS  # the clock is told of nothing meanwhile
        began = now()
        followed()
        between = now()
        plain()
        found.append((between - began) - (now() - between) - (_not_told - nothing))
    _not_told, _way_ns = before, max(0, min(found) // CALLS)
