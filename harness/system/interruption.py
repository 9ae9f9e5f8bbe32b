"""SIGTERM and SIGHUP end a command as Ctrl-C does: what is known so far is written, and nothing by halves.

A batch system sends SIGTERM some seconds before it kills; a closed terminal sends SIGHUP.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

CTRL_C_STATUS = 128 + signal.SIGINT
_ENDING = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
_received: list[int] = []
_AGAIN_S = 0.02
_IMPORTING = "<frozen importlib._bootstrap>"
_TWICE_S = 0.05
"""Signals so close are one: of a Ctrl-C both a terminal and a parent that passes it on deliver theirs."""
_last_s = [-math.inf]
_repeated: list[threading.Timer] = []
_held = threading.Event()


@contextmanager
def signals_answered() -> Generator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP are ours, unless somebody set them otherwise (nohup): each raises
    KeyboardInterrupt within `interruptible`, and before and after it ends the process at once, without a
    word. Within another one nothing changes.

    Python drops what is raised in a weak reference's callback or in __del__, and a run has thousands of those
    a step: an interrupt that is dropped there is made again a moment later. One that comes while a module is
    imported waits for it: C++ code that imports ends the process with a list of frames (torch.distributed's).
    """
    mine: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other thread set a handler
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
        mine = {n: now for n, now in handlers.items() if now in (signal.SIG_DFL, signal.default_int_handler)}
    if mine:
        _received.clear()
        _last_s[0] = -math.inf
    unraisable = sys.unraisablehook

    def repeat(dropped: "sys.UnraisableHookArgs") -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            return unraisable(dropped)
        _repeat(_received[0] if _received else signal.SIGINT)

    sys.unraisablehook = repeat
    for number in mine:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for timer in _repeated:
            timer.cancel()
        _repeated.clear()
        sys.unraisablehook = unraisable
        for number, handler in mine.items():
            signal.signal(number, handler)


def interruptible(command: Callable[[], None]) -> None:
    """Call it. Within `signals_answered`, a signal that comes now raises KeyboardInterrupt in it, and two at
    once raise one, so that the second does not hit what answers the first.
    """
    command()


@contextmanager
def held_back() -> Generator[None]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP wait; at the end the first of them is raised."""
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
    """Whether the main thread is where signals wait (`held_back`): what it writes would be half."""
    return _held.is_set()


def interrupted_status() -> int:
    """128 + the number of the signal, as shells count: 130 after Ctrl-C, 143 SIGTERM, 129 SIGHUP."""
    return 128 + _received[0] if _received else CTRL_C_STATUS


def _repeat(number: int) -> None:
    _repeated.append(threading.Timer(_AGAIN_S, _send_again, (number,)))
    _repeated[-1].daemon = True
    _repeated[-1].start()


def _send_again(number: int) -> None:
    """It is no second signal: the first was dropped, or came too early."""
    _last_s[0] = -math.inf
    os.kill(os.getpid(), number)


def _interrupt(number: int, frame: FrameType | None) -> None:
    now_s = time.monotonic()
    again, _last_s[0] = now_s - _last_s[0] < _TWICE_S, now_s
    if again:
        return
    _received.append(number)
    within, importing = _within_command(frame)
    if not within:  # raised there, it would hit what says how the command ended
        os._exit(128 + _received[0])
    if importing:
        return _repeat(number)
    raise KeyboardInterrupt


def _within_command(frame: FrameType | None) -> tuple[bool, bool]:
    """Whether it is within `interruptible`, and within an import there. Told from the stack: a flag would be
    set and cleared a moment too late or too early."""
    importing = False
    while frame is not None and frame.f_code is not interruptible.__code__:
        importing |= frame.f_code.co_filename == _IMPORTING
        frame = frame.f_back
    return frame is not None, importing
