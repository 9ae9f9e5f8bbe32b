"""Reads files up to a given size, and writes files as a whole or not at all."""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

from harness.errors import InputError


def read_whole(path: str | Path, max_bytes: int) -> bytes:
    """The bytes of the regular file at `path`, which may come from anybody.

    Raises OSError, whose `strerror` is a phrase for a message, for a file of more than `max_bytes`, which is
    not read, and for everything that open_regular refuses.
    """
    with open_regular(path) as file:
        reported = os.fstat(file.fileno()).st_size
        content = b"" if reported > max_bytes else file.read(max_bytes + 1)
        size_bytes = max(reported, len(content))
        if size_bytes > max_bytes:
            what = f"it has {size_bytes:,} bytes, and at most {max_bytes:,} are read"
            raise OSError(errno.EFBIG, what, str(path))
        return content


def open_regular(path: str | Path) -> BinaryIO:
    """The regular file at `path`, which may come from anybody, open for reading.

    Raises OSError, whose `strerror` is a phrase for a message. A pipe, a device, a socket or a folder is
    refused without waiting for it, even if it replaces a file at the last moment.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        _refuse_irregular(os.stat(path), path)  # first: opening a device can change it
        descriptor = os.open(path, flags)
    except ValueError:
        raise OSError(errno.EINVAL, "its name holds a null byte", str(path)) from None
    try:
        _refuse_irregular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def _refuse_irregular(status: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is a folder", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` (a str as UTF-8) to `path`, replacing what was there.

    A reader sees the old file or the new one, never a part, and a failure (or Ctrl-C) leaves nothing
    behind: the bytes go to a new file in the same folder, reach the disk, and then take the name.
    A symbolic link keeps pointing to its target, which is replaced.
    Raises InputError naming the path when the folder is missing, not writable or full, or when the
    path is a folder or a device.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"cannot write {path}: it is a folder or a device. Give the path of a file.")
        try:
            with open(partial, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(target.parent)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}. "
            f"Give a path in an existing, writable folder with room for {len(data):,} bytes."
        ) from None


def make_folder(path: Path) -> None:
    """Make the folder that --out names, unless it exists. Raises InputError where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out {path}: cannot make the folder: {error.strerror}. Give a folder that can be written."
        ) from None


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk: else a power cut can undo a rename."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
