"""Has SIGTERM and SIGHUP end a command as Ctrl-C does: results so far are written, and no file in part.

A batch system sends SIGTERM some seconds before it kills a process; a closed terminal sends SIGHUP.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

CTRL_C_STATUS = 128 + signal.SIGINT
_ENDING = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
_received: list[int] = []
"""The signals that interrupted the command, in order."""
_AGAIN_S = 0.02
"""Seconds after which an interrupt that was dropped, or came too early, is made again."""
_IMPORTING = "<frozen importlib._bootstrap>"
"""The file name of frames that import a module."""
_TWICE_S = 0.05
"""Signals within so many seconds count as one: for a Ctrl-C, the terminal sends one, and so does a parent
process that passes its own on."""
_last_s = [-math.inf]
"""When the last signal came, by time.monotonic()."""
_repeated: list[threading.Timer] = []
_held = threading.Event()
"""Set while `held_back` makes signals wait."""


@contextmanager
def signals_answered() -> Generator[None]:
    """Inside the `with` block, Ctrl-C, SIGTERM and SIGHUP have handlers of harness, unless the program or its
    parent set others (as nohup does): each raises KeyboardInterrupt within `interruptible`, and before and
    after it ends the process at once, silently. A block within another one changes nothing.

    Python drops what is raised in a weak reference's callback or in __del__, and a run has thousands of those
    a step: an interrupt that is dropped there is made again a moment later. One that comes during an import
    is made again too: C++ code that imports a module, as torch.distributed's, would end the process with a
    list of frames.
    """
    replaced: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other thread set a handler
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
        replaced = {number: handler for number, handler in handlers.items() if handler in defaults}
    if replaced:
        _received.clear()
        _last_s[0] = -math.inf
    unraisable = sys.unraisablehook
    sys.unraisablehook = partial(_repeat_dropped, unraisable)
    for number in replaced:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for timer in _repeated:
            timer.cancel()
        _repeated.clear()
        sys.unraisablehook = unraisable
        for number, handler in replaced.items():
            signal.signal(number, handler)


def interruptible(command: Callable[[], None]) -> None:
    """Call `command`. Within `signals_answered`, a signal raises KeyboardInterrupt in it. Two signals at once
    raise one, so that the second does not interrupt the handling of the first.
    """
    command()


@contextmanager
def held_back() -> Generator[None]:
    """Inside the `with` block, Ctrl-C, SIGTERM and SIGHUP wait; at its end the first of them is raised."""
    waiting: list[int] = []

    def wait(number: int, _: FrameType | None) -> None:
        waiting.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
        before = {n: handler for n, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, wait)
    _held.set()
    try:
        yield
    finally:
        _held.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
    if waiting:
        signal.raise_signal(waiting[0])


def is_writing() -> bool:
    """Whether signals wait now (`held_back`): a process that ended would leave what it writes in part."""
    return _held.is_set()


def interrupted_status() -> int:
    """128 + the signal's number, as shells have it: 130 after Ctrl-C, 143 SIGTERM, 129 SIGHUP."""
    return 128 + _received[0] if _received else CTRL_C_STATUS


def _repeat_dropped(
    otherwise: "Callable[[sys.UnraisableHookArgs], object]", dropped: "sys.UnraisableHookArgs"
) -> None:
    """The hook for exceptions that Python drops: an interrupt is made again, and others go to `otherwise`."""
    if not isinstance(dropped.exc_value, KeyboardInterrupt):
        otherwise(dropped)
        return
    _repeat(_received[0] if _received else signal.SIGINT)


def _repeat(number: int) -> None:
    """Send this process the signal again in a moment."""
    _repeated.append(threading.Timer(_AGAIN_S, _send_again, (number,)))
    _repeated[-1].daemon = True
    _repeated[-1].start()


def _send_again(number: int) -> None:
    _last_s[0] = -math.inf  # else it would count as one with the first, which was dropped or came too early
    os.kill(os.getpid(), number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The handler of signals within `signals_answered`."""
    now_s = time.monotonic()
    again, _last_s[0] = now_s - _last_s[0] < _TWICE_S, now_s
    if again:
        return
    _received.append(number)
    within, too_early = _within_command(frame)
    if not within:  # an exception would interrupt what reports how the command ended
        os._exit(128 + _received[0])
    if too_early:
        return _repeat(number)
    raise KeyboardInterrupt


def _within_command(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether `frame` is within `interruptible`, and whether it is within an import there, or where an
    interrupt that was dropped is made again, which drops the next one. The stack says so: a flag would be set
    and cleared a moment too late or too early."""
    too_early = False
    while frame is not None and frame.f_code is not interruptible.__code__:
        too_early |= frame.f_code.co_filename == _IMPORTING or frame.f_code is _repeat_dropped.__code__
        frame = frame.f_back
    return frame is not None, too_early
