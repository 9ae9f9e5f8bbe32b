"""Checkpoints on disk: folders that appear whole or not at all, and are checked byte by byte before use.

RUN/checkpoints/step-10 is the state after 10 steps. Its manifest.json holds the size and the SHA-256 of
every other file. Imports no torch.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.system import held_back, is_object, parse_json, read_whole, sync

FORMAT = 1
"""The version of the manifest's format."""
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1_000_000
KEPT = 2
"""How many checkpoints are kept: the last one, and the one before in case the last turns out to be bad."""
_NAME = re.compile(r"step-(\d{1,12})")
"""The name of a checkpoint's folder."""
_PARTIAL = re.compile(r"\.step-\d+\.[0-9a-f]{16}\.partial")
"""The name of a checkpoint's folder while it is written or removed."""


def write_checkpoint(folder: Path, steps_done: int, write: Callable[[Path], None]) -> Path:
    """Make the checkpoint `folder`/step-N of the files that `write` puts into the folder it is given, and
    remove all but the last KEPT checkpoints. Returns the checkpoint's path.

    The files go to a folder of another name, reach the disk, and then that folder gets its name. Raises
    InputError naming the path for a full disk and the like; the checkpoints before are intact then.
    """
    target = folder / f"step-{steps_done}"
    partial = folder / f".step-{steps_done}.{secrets.token_hex(8)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():  # what a killed run left half-written or half-removed
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path)
        try:
            partial.mkdir()
            write(partial)
            files = {path.name: _size_and_hash(path) for path in sorted(partial.iterdir())}
            (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")
            for path in partial.iterdir():
                sync(path)
            sync(partial)
            if target.exists():  # of a run that was resumed from an earlier step
                _remove(target)
            os.rename(partial, target)
        except BaseException:
            with held_back():  # a second interrupt must not leave half of it
                shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(folder)
        for old in checkpoints(folder)[:-KEPT]:
            _remove(old)
    except OSError as error:
        raise InputError(
            f"cannot write the checkpoint {target}: {error.strerror or error}. Make room on that disk, give "
            "another --out, or set checkpoint_every: 0."
        ) from None
    return target


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, the earliest first; empty if there is no such folder."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=steps_done_of)


def steps_done_of(checkpoint: Path) -> int:
    """How many steps were done when `checkpoint` (.../step-N) was written."""
    return int(checkpoint.name.removeprefix("step-"))


def verify(checkpoint: Path) -> None:
    """Read every byte of a checkpoint. Raises InputError naming the first file that is not as written."""
    files = _manifest(checkpoint)
    present = {path.name for path in checkpoint.iterdir()} - {MANIFEST}
    for name in sorted(files.keys() | present):
        path = checkpoint / name
        if name not in files:
            raise _refused(path, "is not in the manifest")
        if not path.is_file() or path.is_symlink():
            raise _refused(path, "is missing")
        try:
            found = _size_and_hash(path)
        except OSError as error:
            raise _refused(path, f"cannot be read: {error.strerror}") from None
        if found["bytes"] != files[name].get("bytes"):
            raise _refused(
                path, f"has {found['bytes']} bytes and was written with {files[name].get('bytes')}"
            )
        if found["sha256"] != files[name].get("sha256"):
            raise _refused(path, "is not what was written: its SHA-256 is another one")


def _manifest(checkpoint: Path) -> dict[str, Any]:
    """The size and hash of each file of a checkpoint as its manifest states them. Raises InputError."""
    path = checkpoint / MANIFEST
    try:
        document = parse_json(read_whole(path, MAX_MANIFEST_BYTES))
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise _refused(path, "is not whole: it is no JSON") from None
    if not is_object(document) or document.get("format") != FORMAT:
        raise _refused(path, f"is not of format {FORMAT}, the one this version of harness reads")
    files = document.get("files")
    if not is_object(files) or not all(is_object(entry) for entry in files.values()):
        raise _refused(path, "has no list of files")
    return files


def _refused(path: Path, why: str) -> InputError:
    return InputError(
        f"--resume: {path} {why}. Remove that checkpoint, and the one before it is used; "
        "without any the run begins anew."
    )


def _size_and_hash(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a part of it is never taken for the whole."""
    partial = checkpoint.with_name(f".{checkpoint.name}.{secrets.token_hex(8)}.partial")
    with held_back():
        os.rename(checkpoint, partial)
        shutil.rmtree(partial)
