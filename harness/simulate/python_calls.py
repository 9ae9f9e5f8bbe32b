"""Counts the Python functions that a program calls: between two operators they are what the host does."""

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_HARNESS, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_OF_A_DISPATCH_MODE = _TORCH / "_library", _TORCH / "utils" / "_python_dispatch.py", _TORCH / "_ops.py"
_NOT_COUNTED = (f"{_HARNESS}{os.sep}", *map(str, _OF_A_DISPATCH_MODE), "<string>")
"""Where the functions are that are not counted: harness' own, of which a step has few besides those of the
simulation; those of dispatch modes; and those without a file, as dataclasses make them, whose number is
another the first time that DTensor looks into its cache."""
_BY_CHANCE = "__eq__", "_check_equals"
"""The names of functions that are not counted either: addresses decide how often DTensor's caches compare."""
_ALIKE = 32
"""After how many operators that came before in the same order the Python that follows is the same again."""
_TOOL = 4
"""A number for sys.monitoring that debuggers, profilers and measures of coverage leave free."""


def _counts(code: CodeType) -> bool:
    return code.co_name not in _BY_CHANCE and not code.co_filename.startswith(_NOT_COUNTED)


class PythonCalls:
    """Counts this thread's calls while `counting`, without nearly all of those that a simulation makes."""

    def __init__(self) -> None:
        self.number = 0
        """How many were counted since somebody set this to 0."""
        self._pauses = 0
        """How many there are, one within the other."""
        self._before = (0,) * _ALIKE
        """The addresses of the last operators, the latest last."""
        self._counted: dict[tuple[int, ...], tuple[int, int]] = {}
        """By what came before: how many calls followed, and how many times in a row."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, calls are counted, unless another tool would have to give way for it. That is warned of."""
        if not self._begin():
            warnings.warn(
                "a profiler or another simulation watches this process' calls: what the host takes for "
                "Python is left out of the simulated time.",
                RuntimeWarning,
                stacklevel=2,
            )
            yield
            return
        try:
            yield
        finally:
            self._end()

    if sys.version_info >= (3, 12):  # where sys.setprofile takes many times as long

        def _begin(self) -> bool:
            if sys.monitoring.get_tool(_TOOL) is not None:
                return False
            sys.monitoring.use_tool_id(_TOOL, "harness")
            self._thread = threading.get_ident()  # calls of all threads are heard
            self._tell(self._called)
            return True

        def _end(self) -> None:
            self._tell(None)
            sys.monitoring.free_tool_id(_TOOL)

        def _tell(self, callback: Any) -> None:
            """Have this called for each function that begins or goes on; None: nothing."""
            events = sys.monitoring.events.PY_START, sys.monitoring.events.PY_RESUME
            for event in events:
                sys.monitoring.register_callback(_TOOL, event, callback)
            sys.monitoring.set_events(_TOOL, sum(events) if callback else 0)

        def _called(self, code: CodeType, _: int) -> Any:
            if not _counts(code):
                return sys.monitoring.DISABLE
            if not self._pauses and threading.get_ident() == self._thread:
                self.number += 1

        def until(self, _: object) -> int:
            """How many calls the program made from the operator before to this one."""
            number, self.number = self.number, 0
            return number

        def pause(self) -> None:
            """Count nothing until `resume`: what follows is not the program's."""
            self._pauses += 1  # looking at it takes less than to have nothing called

        def resume(self) -> None:
            """Count again, if no other pause goes on."""
            self._pauses -= 1

    else:
        _profile: Any = None
        """What Python calls for every call of a function; None while no calls are counted."""
        _known = False
        """Whether what follows is known, so that it need not be counted: with a profile function, all of the
        interpreter's instructions take twice as long."""

        def _begin(self) -> bool:
            if sys.getprofile() is not None:
                return False
            self._before, self._known = (0,) * _ALIKE, False
            known: dict[int, tuple[CodeType, bool]] = {}  # by id: a code's hash is slow

            def called(frame: FrameType, event: str, _: Any) -> None:
                if event == "call":
                    code = frame.f_code
                    if id(code) not in known:
                        known[id(code)] = code, _counts(code)
                    self.number += known[id(code)][1]

            self._profile = called
            sys.setprofile(called)
            return True

        def _end(self) -> None:
            self._profile = None
            sys.setprofile(None)

        def until(self, operator: object) -> int:
            """How many calls the program made from the operator before to this one.

            After `_ALIKE` operators in the same order, what was counted twice in a row is believed: layers
            are alike. Call it while paused."""
            number, times = self._counted.get(self._before, (self.number, 0))
            if not self._known:
                times = times + 1 if number == self.number else 1
                number = self.number
                self._counted[self._before] = number, times
            self._before = *self._before[1:], id(operator)
            self._known = self._counted.get(self._before, (0, 0))[1] > 1
            self.number = 0
            return number

        def pause(self) -> None:
            """Count nothing until `resume`: what follows is not the program's."""
            if self._pauses == 0 and self._profile is not None and not self._known:
                sys.setprofile(None)
            self._pauses += 1

        def resume(self) -> None:
            """Count again, if no other pause goes on."""
            self._pauses -= 1
            if self._pauses == 0 and self._profile is not None and not self._known:
                sys.setprofile(self._profile)
