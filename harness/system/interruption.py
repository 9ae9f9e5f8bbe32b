"""SIGTERM and SIGHUP end a command as Ctrl-C does: what is known so far is written, and nothing by halves.

A batch system sends SIGTERM some seconds before it kills; a closed terminal sends SIGHUP.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CTRL_C_STATUS = 128 + signal.SIGINT
_ENDING = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
_received: list[int] = []
_AGAIN_S = 0.02
_held = threading.Event()


@contextmanager
def interruptible() -> Generator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt, unless somebody set them otherwise (nohup).

    Python drops what is raised in a weak reference's callback or in __del__, and a run has thousands of those
    a step: an interrupt that is dropped there is made again a moment later.
    """
    mine = []
    if threading.current_thread() is threading.main_thread():  # Python lets no other thread set a handler
        mine = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    _received.clear()
    unraisable, repeated = sys.unraisablehook, list[threading.Timer]()

    def repeat(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):
            return unraisable(dropped)
        number = _received[0] if _received else signal.SIGINT
        repeated.append(threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number)))
        repeated[-1].daemon = True
        repeated[-1].start()

    sys.unraisablehook = repeat
    for number in mine:
        signal.signal(number, _interrupt)
    try:
        yield
    finally:
        for timer in repeated:
            timer.cancel()
        sys.unraisablehook = unraisable
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


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


def _interrupt(number: int, _: FrameType | None) -> NoReturn:
    _received.append(number)
    raise KeyboardInterrupt
