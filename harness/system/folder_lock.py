"""One writer to a folder at a time. The kernel frees the lock when a process ends, however it ends."""

import json
import os
import socket
import stat
import sys
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.errors import InputError
from harness.system.strict_json import is_object

if sys.platform != "win32":
    import fcntl

NAME = ".lock"
"""Removed by the one who holds it; a process that is killed leaves it, free."""
LENGTH = 500
"""Bytes that the holder writes, always as many: over what the one before wrote."""
TRIES = 5
BETWEEN_TRIES_S = 0.05


class FolderLock:
    """Held from the start until `release`, the end of a `with` block, or the end of the process."""

    def __init__(self, folder: Path, origin: str) -> None:
        """Raises InputError beginning with `origin` and naming who holds it, or why it cannot be made."""
        self._file: int | None = None
        self._path = folder / NAME
        try:
            file = _taken(self._path)
            if isinstance(file, str):
                raise _refused(origin, file)
            self._file = file
            now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
            mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
            os.pwrite(file, json.dumps(mine).encode()[:LENGTH].ljust(LENGTH), 0)
        except OSError as error:  # of a full disk the file can be made, and not written
            raise InputError(
                f"{origin}: cannot lock the folder with {self._path}: {error.strerror}. "
                "Give a folder that can be written."
            ) from None

    def release(self) -> None:
        """Free the lock, and leave nothing behind."""
        if self._file is not None:
            with suppress(OSError):  # somebody has removed it, or the folder
                os.unlink(self._path)
            os.close(self._file)
        self._file = None

    __del__ = release

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def refuse_held(folder: Path, origin: str) -> None:
    """Raise InputError if somebody holds the lock of `folder` now. Makes nothing."""
    try:
        file = _opened(folder / NAME, os.O_RDONLY)
    except OSError:  # there is no lock, or none that can be read: whoever takes it will see
        return
    try:
        if not _lock(file):
            raise _refused(origin, _holder(file))
    finally:
        os.close(file)


def is_held(folder: Path) -> bool:
    """Whether somebody holds the lock of `folder` now. Makes nothing."""
    try:
        refuse_held(folder, "")
    except InputError:
        return True
    return False


def _taken(path: Path) -> int | str:
    """The locked file; or who holds it. Raises OSError when there can be none."""
    who = ""
    for _ in range(TRIES):
        file = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            if _lock(file):
                if os.path.lexists(path) and os.path.samestat(os.fstat(file), os.lstat(path)):
                    file, taken = -1, file
                    return taken
                continue  # the one before has removed this very file: the name is another one's
            who = _holder(file)
        finally:
            if file >= 0:
                os.close(file)
        time.sleep(BETWEEN_TRIES_S)  # somebody who only asks holds it for an instant
    return who or "another process"


def _opened(path: Path, flags: int) -> int:
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0), 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is not a regular file")
    return file


def _lock(file: int) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: int) -> str:
    """What the holder wrote; it may have written nothing yet."""
    try:
        found: Any = json.loads(os.pread(file, LENGTH, 0))
    except (OSError, ValueError, RecursionError):
        found = None
    if not is_object(found):
        return "another process"
    return f"process {found.get('pid')!s:.20} on {found.get('host')!s:.100}, since {found.get('since')!s:.20}"


def _refused(origin: str, who: str) -> InputError:
    return InputError(f"{origin}: {who}, writes there. Wait for it to end, or give another folder.")
