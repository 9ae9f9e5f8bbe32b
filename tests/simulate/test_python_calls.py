"""What a simulation counts of a program's Python."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from harness.simulate.python_calls import PythonCalls


def called() -> None:
    """Nothing, but for being called."""


@contextmanager
def another_tool(seen: list[str]) -> Iterator[None]:
    """One that is told of calls in the way in which `PythonCalls` is."""
    if sys.version_info < (3, 12):
        sys.setprofile(lambda frame, *_: seen.append(frame.f_code.co_name))
        yield
        sys.setprofile(None)
        return
    monitoring = sys.monitoring
    monitoring.use_tool_id(4, "a test")
    monitoring.register_callback(4, monitoring.events.PY_START, lambda code, _: seen.append(code.co_name))
    monitoring.set_events(4, monitoring.events.PY_START)
    yield
    monitoring.set_events(4, 0)
    monitoring.free_tool_id(4)


def test_functions_are_counted_and_what_torch_does_in_c_is_not() -> None:
    calls = PythonCalls()
    one = torch.ones(2)
    with calls.counting():
        for _ in range(10):
            called()
            one + one
    of_the_context = calls.number - 10
    assert 0 <= of_the_context <= 2


def test_comparisons_are_not_counted() -> None:
    """How often the caches of DTensor compare what they look up, the addresses of a process decide."""

    class Alike:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            return self is other

    calls, keys = PythonCalls(), [Alike() for _ in range(20)]
    with calls.counting():
        found = dict.fromkeys(keys)  # 20 hashes, and 190 comparisons
    assert len(found) == 20
    assert 20 <= calls.number <= 22


def test_nothing_is_counted_while_paused_nor_afterwards() -> None:
    calls = PythonCalls()
    with calls.counting():
        called()
        before = calls.number
        calls.pause()
        called()
        calls.pause()  # one within the other
        calls.resume()
        called()
        calls.resume()
        paused = calls.number
        called()
        resumed = calls.number
    assert paused == before > 0
    assert resumed == before + 1
    ended = calls.number
    called()
    assert calls.number == ended


def test_what_follows_a_layer_s_operators_is_counted_in_the_first_layers_and_believed_in_the_others() -> None:
    calls, counted, watched = PythonCalls(), [], []
    names = [f"operator {n}" for n in range(50)]
    with calls.counting():
        for layer in range(8):
            for n, operator in enumerate(names):
                for _ in range(
                    n % 3 + 10 * (layer == 7)
                ):  # the last layer does more, which only counting sees
                    called()
                watched.append(sys.version_info >= (3, 12) or sys.getprofile() is not None)
                calls.pause()
                counted.append(calls.until(operator))
                calls.resume()
        called()
    a_layer = [n % 3 for n in range(50)]
    assert counted[1 : 7 * 50] == (7 * a_layer)[1:]  # before the very first there is the context's own
    of_the_last = [n if sys.version_info < (3, 12) else n + 10 for n in a_layer]
    assert counted[7 * 50 :] == of_the_last
    assert all(watched[:100])
    assert sys.version_info >= (3, 12) or not any(watched[200:])


def test_a_profiler_of_the_program_keeps_its_own() -> None:
    calls, seen = PythonCalls(), []
    with (
        another_tool(seen),
        pytest.warns(RuntimeWarning, match="left out of the simulated time"),
        calls.counting(),
    ):
        called()
    assert "called" in seen
    assert calls.number == 0


def test_another_thread_s_calls_are_not_counted() -> None:
    calls = PythonCalls()
    with calls.counting():
        other = threading.Thread(target=lambda: [called() for _ in range(1000)])
        other.start()
        other.join()
    assert calls.number < 100  # of starting the thread
