"""What a simulation counts of a program's Python."""

import sys

import torch

from harness.simulate.python_calls import PythonCalls


def called() -> None:
    """Nothing, but for being called."""


def test_functions_are_counted_and_what_torch_does_in_c_is_not() -> None:
    calls = PythonCalls()
    one = torch.ones(2)
    with calls.counting():
        for _ in range(10):
            called()
            one + one
    of_the_context = calls.number - 10
    assert 0 <= of_the_context <= 2


def test_nothing_is_counted_while_paused_nor_afterwards() -> None:
    calls = PythonCalls()
    with calls.counting():
        before = calls.number
        calls.pause()
        called()
        calls.resume()
        assert calls.number == before
    ended = calls.number
    called()
    assert calls.number == ended


def test_a_profiler_of_the_program_keeps_its_own() -> None:
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append((event, frame.f_code.co_name)))
    try:
        with PythonCalls().counting():
            called()
    finally:
        sys.setprofile(None)
    assert ("call", "called") in seen
