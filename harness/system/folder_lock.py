"""A lock with which one process at a time writes to a folder. The operating system frees it when the process
ends, however it ends."""

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
"""The lock's file. Its holder removes it in the end; a killed process leaves it behind, unlocked."""
LENGTH = 500
"""Bytes that the holder writes about itself: always as many, so that they cover what another wrote."""
TRIES = 5
"""How often the lock is tried before it counts as held by another process."""
BETWEEN_TRIES_S = 0.05


class FolderLock:
    """The lock of a folder, held from its construction until `release`, the end of a `with` block or the end
    of the process."""

    def __init__(self, folder: Path, origin: str) -> None:
        """Raises InputError, beginning with `origin`: who holds the lock, or why there can be none."""
        self._file: int | None = None
        self._path = folder / NAME
        try:
            file = _taken(self._path)
            if isinstance(file, str):
                raise _refused(origin, file)
            self._file = file
            now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
            os.pwrite(file, json.dumps(holder).encode()[:LENGTH].ljust(LENGTH), 0)
        except OSError as error:  # on a full disk the file can be made, and not written
            raise InputError(
                f"{origin}: cannot lock the folder with {self._path}: {error.strerror}. "
                "Give a folder that can be written."
            ) from None

    def release(self) -> None:
        """Free the lock and remove its file."""
        if self._file is not None:
            with suppress(OSError):  # another process has removed it, or the folder
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
    """Raise InputError, beginning with `origin`, if a process holds the folder's lock. Makes no file."""
    try:
        file = _opened(folder / NAME, os.O_RDONLY)
    except OSError:  # there is no lock, or none that can be read, which is found out when it is taken
        return
    try:
        if not _lock(file):
            raise _refused(origin, _holder(file))
    finally:
        os.close(file)


def is_held(folder: Path) -> bool:
    """Whether a process holds the lock of `folder` now. Makes no file."""
    try:
        refuse_held(folder, "")
    except InputError:
        return True
    return False


def _taken(path: Path) -> int | str:
    """The descriptor of the locked file; or, in words, who holds it. OSError if there can be no lock."""
    who = ""
    for _ in range(TRIES):
        file = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            if _lock(file):
                if os.path.lexists(path) and os.path.samestat(os.fstat(file), os.lstat(path)):
                    file, taken = -1, file
                    return taken
                continue  # the last holder removed this file after it was opened: `path` is another one now
            who = _holder(file)
        finally:
            if file >= 0:
                os.close(file)
        time.sleep(BETWEEN_TRIES_S)  # a process in refuse_held holds it for an instant
    return who or "another process"


def _opened(path: Path, flags: int) -> int:
    """The descriptor of the regular file at `path`. Raises OSError for anything else there."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0), 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(0, "it is not a regular file")
    return file


def _lock(file: int) -> bool:
    """Lock the file. False if another process has it locked. Windows has no such locks: always True."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: int) -> str:
    """Who holds the lock, in words, by what the holder wrote; it may have written nothing yet."""
    try:
        holder: Any = json.loads(os.pread(file, LENGTH, 0))
    except (OSError, ValueError, RecursionError):
        holder = None
    if not is_object(holder):
        return "another process"
    pid, host, since = (str(holder.get(name)) for name in ("pid", "host", "since"))
    return f"process {pid:.20} on {host:.100}, since {since:.20}"


def _refused(origin: str, who: str) -> InputError:
    return InputError(f"{origin}: {who}, writes there. Wait for it to end, or give another folder.")
