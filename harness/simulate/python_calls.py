"""Counts the Python functions that a program calls: between two operators they are what the host does."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

_HARNESS, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_OF_A_DISPATCH_MODE = _TORCH / "_library", _TORCH / "utils" / "_python_dispatch.py", _TORCH / "_ops.py"
_NOT_COUNTED = (str(_HARNESS), *map(str, _OF_A_DISPATCH_MODE), "<string>")
"""Where the functions are that are hardly called without the simulation's dispatch mode; and those that
dataclasses make, whose number is another the first time that DTensor looks into its cache."""
_TOOL = 4
"""A number for sys.monitoring that debuggers, profilers and measures of coverage leave free."""


def _counts(code: CodeType) -> bool:
    return not code.co_filename.startswith(_NOT_COUNTED)


class PythonCalls:
    """Counts this thread's calls while `counting`, without those that a simulation itself makes."""

    def __init__(self) -> None:
        self.number = 0
        """How many were counted since somebody set this to 0."""
        self._paused = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, calls are counted, unless another tool would have to give way for it."""
        if self._begin():
            try:
                yield
            finally:
                self._end()
        else:
            yield

    if sys.version_info >= (3, 12):  # where sys.setprofile takes many times as long

        def _begin(self) -> bool:
            monitoring = sys.monitoring
            if monitoring.get_tool(_TOOL) is not None:
                return False
            monitoring.use_tool_id(_TOOL, "harness")
            for event in (monitoring.events.PY_START, monitoring.events.PY_RESUME):
                monitoring.register_callback(_TOOL, event, self._called)
            monitoring.set_events(_TOOL, monitoring.events.PY_START | monitoring.events.PY_RESUME)
            return True

        def _end(self) -> None:
            sys.monitoring.set_events(_TOOL, 0)
            sys.monitoring.free_tool_id(_TOOL)

        def _called(self, code: CodeType, _: int) -> Any:
            if not _counts(code):
                return sys.monitoring.DISABLE
            self.number += not self._paused

        def pause(self) -> None:
            """Count nothing until `resume`: an operator is computed on shapes."""
            self._paused = True

        def resume(self) -> None:
            """Count again."""
            self._paused = False

    else:
        _profile: Any = None
        """What Python calls for every call of a function; None while no calls are counted."""

        def _begin(self) -> bool:
            if sys.getprofile() is not None:
                return False
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

        def pause(self) -> None:
            """Count nothing until `resume`: an operator is computed on shapes."""
            if self._profile is not None:
                sys.setprofile(None)

        def resume(self) -> None:
            """Count again."""
            if self._profile is not None:
                sys.setprofile(self._profile)
