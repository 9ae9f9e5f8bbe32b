"""The time that following values takes, which the clock leaves out: on a GPU no program spends it."""

import ctypes
from time import monotonic_ns as now

import torch
from virtual_gpu_keys import switched

ROUNDS, CALLS = 5, 50
"""Of an operator, to measure the crossing."""

following_ns = ctypes.c_int64.in_dll(ctypes.CDLL(None), "virtual_gpu_clock")
"""What c/clock.c leaves out of the program's time."""
_crossing_ns = 0
"""What PyTorch takes to call a kernel in Python, and to be called back."""


def not_the_programs(nanoseconds):
    """Set the clock back by what an operator's kernel in Python took, as if that had not passed. At once, so
    that no event lies before an earlier one."""
    following_ns.value += nanoseconds + _crossing_ns  # no other thread runs Python in between


def measure_the_crossing():
    """Learn how much longer an operator takes where its values are followed, beyond what `not_the_programs`
    is told of it."""
    global _crossing_ns
    number = torch.zeros(1, device="cpu")

    def call():
        for _ in range(CALLS):
            number.add_(number)

    followed, plain = switched(call, True), switched(call, False)
    found = []
    for _ in range(ROUNDS):
        told, began = following_ns.value, now()
        followed()
        between = now()
        plain()
        found.append((between - began) - (now() - between) - (following_ns.value - told))
    _crossing_ns = max(0, min(found) // CALLS)
