"""What Python code does to the machine, heard from audit events: files written, processes, connections."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHANGES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"),
    *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("socket.connect", "socket.bind", "socket.sendto", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
    *("pickle.find_class", "ctypes.dlopen", "pty.spawn", "webbrowser.open"),
}
"""Events of https://docs.python.org/3/library/audit_events.html that change something or run something."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
PATHS = ("os.m", "os.r", "os.l", "os.s", "os.t", "os.c", "shutil.rmtree")
"""What these events begin with: the path comes first."""
DEVICES = ("/dev/null", "/dev/tty")

_folder: str | None = None
_seen: list[str] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if _folder is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or not (flags or 0) & WRITES:
            return
    elif event in CHANGES:
        path = arguments[0] if event.startswith(PATHS) else None
        if event in ("os.remove", "os.rmdir") and arguments[1] != -1:  # a name in an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[1]}"), arguments[0])
    else:
        return
    if isinstance(path, str | bytes | os.PathLike):
        where = os.path.abspath(os.fsdecode(path))
        inside = where == _folder or where.startswith(_folder + os.sep)
        if inside or where in DEVICES or f"{os.sep}__pycache__" in where:
            return
    _seen.append(f"{event}{arguments!r:.300}")


sys.addaudithook(_hear)  # there is no way to take one off again; it sleeps outside `watched`


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Fail if anything inside is written outside `folder`, runs a program, connects, or takes too long.

    Too long: 10 s of the processor, or 60 s of the clock, which other programs make run on.
    """
    global _folder

    def late(number: int, _: object) -> None:
        raise AssertionError(f"not done in time ({signal.Signals(number).name})")

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, 10), signal.SIGALRM: (signal.ITIMER_REAL, 60)}
    before = {number: signal.signal(number, late) for number in timers}
    _seen.clear()
    _folder = os.path.abspath(folder)
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        _folder = None
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not _seen, f"outside {folder}: {_seen}"
