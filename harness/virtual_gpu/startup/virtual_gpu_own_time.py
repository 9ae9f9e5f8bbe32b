"""The time that following values takes, which the clock leaves out: on a GPU no program spends it."""

import ctypes
from time import monotonic_ns as now

import torch
from virtual_gpu_keys import switched

ROUNDS, CALLS = 5, 50
"""Of an operator, to measure the crossing."""

_go_on = ctypes.CDLL(None).virtual_gpu_go_on
_go_on.argtypes = [ctypes.c_int64]
_go_on.restype = None
_crossing_ns = None
"""What PyTorch takes to call a kernel in Python, and to be called back; None until the clock starts."""
_before_the_clock = 0
"""Nanoseconds that came before it started."""


def not_the_programs(nanoseconds):
    """Set the clock back by what an operator's kernel in Python took, as if that had not passed: see
    `virtual_gpu_go_on` in c/clock.c. At once, so that no event lies before an earlier one."""
    global _before_the_clock
    if _crossing_ns is None:
        _before_the_clock += nanoseconds
    else:
        _go_on(now() - nanoseconds - _crossing_ns)


def measure_the_crossing():
    """Learn how much longer an operator takes where its values are followed, beyond what `not_the_programs`
    is told of it. From then on the clock is told."""
    global _crossing_ns
    number = torch.zeros(1, device="cpu")

    def call():
        for _ in range(CALLS):
            number.add_(number)

    followed, plain = switched(call, True), switched(call, False)
    found = []
    for _ in range(ROUNDS):
        told, began = _before_the_clock, now()
        followed()
        between = now()
        plain()
        found.append((between - began) - (now() - between) - (_before_the_clock - told))
    _crossing_ns = max(0, min(found) // CALLS)
