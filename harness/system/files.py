"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from harness.errors import InputError


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
    beside = target.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"cannot write {path}: it is a folder or a device. Give the path of a file.")
        try:
            with open(beside, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        sync_folder(target.parent)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}. "
            f"Give a path in an existing, writable folder with room for {len(data):,} bytes."
        ) from None


def sync_folder(folder: Path) -> None:
    """Have a new name in `folder` reach the disk."""
    # The new name is in the folder's data: without this a power cut can undo the rename.
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
