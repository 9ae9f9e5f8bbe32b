"""Read a memory-viz snapshot from a file that may come from anyone.

A pickle is a program. This reader lets only the instructions run that build dicts, lists, strings,
numbers, booleans, None and pairs of integers, all that a snapshot holds: nothing can be imported or
called. They are checked before the first one runs, by one regular expression, so that a million events
take seconds. Snapshots in JSON are read too: those of snapshot/as_json.py, and the plain structure.
This module imports no torch.
"""

from __future__ import annotations

import gc
import io
import pickle
import pickletools
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import InputError
from harness.snapshot.as_json import is_document, snapshot_of_document
from harness.snapshot.shape import validate_snapshot
from harness.system import parse_json

MAX_FILE_BYTES = 2**30
MAX_STRING_BYTES = 2**20
MAX_CONTAINERS = 2**25
"""Bounds memory: one byte of a file opens a dict of 64. Counted by their opening byte, which strings
and numbers hold too: a file of 1 GiB that torch wrote stays far below."""

_LONG1 = rb"\x8a(?:" + b"|".join(re.escape(bytes([n])) + b"." * n for n in range(10)) + rb")"
_INTEGER = rb"(?:K.|J....|M..|" + _LONG1 + rb")"
_FIXED_LENGTH = re.compile(
    # BINGET, LONG_BINGET; EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE, APPEND(S), SETITEM(S), MARK, NONE, TRUE,
    # FALSE, MEMOIZE; integers of up to 9 bytes, or two of them and TUPLE2 (any other tuple could nest,
    # and hashing a deep one crashes Python); BINPUT; LONG_BINPUT below 2**24 (the unpickler reserves
    # memory up to the index); BINFLOAT
    rb"(?:h.|j....|[]})aeus(N\x88\x89\x94]|"
    + _INTEGER
    + rb"(?:"
    + _INTEGER
    + rb"\x86)?|q.|r...\x00|G.{8})*+",
    re.DOTALL,
)
_LENGTH_BYTES = {b"\x8c": 1, b"X": 4, b"\x95": 8}  # SHORT_BINUNICODE, BINUNICODE, FRAME
_WITH_ARGUMENT = b"hjKJMqrG\x86\x8a"  # admitted above, but for what they are given
_NAMES = {opcode.code.encode("latin1"): opcode.name for opcode in pickletools.opcodes}


def read_snapshot(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """The snapshot in a pickle (protocol 2 to 5) or JSON file, as plain data of checked shape.

    Raises InputError when the file is missing, no regular file, larger than `max_bytes`, cut short,
    holds anything but plain data (naming the instruction and its byte), or is not a snapshot.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"cannot read the snapshot {path}: it is not a regular file. Give a snapshot.pickle or .json."
            )
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(
            f"cannot read the snapshot {path}: {error.strerror}. Give a snapshot.pickle or .json."
        ) from None
    if len(data) > max_bytes:
        raise InputError(
            f"the snapshot {path} is larger than {max_bytes / 2**30:g} GiB. "
            "Record fewer steps, or set a smaller max_entries."
        )
    snapshot = load_plain(data, f"the snapshot {path}")
    if is_document(snapshot):
        snapshot = snapshot_of_document(snapshot, f"the snapshot {path}")
    validate_snapshot(snapshot, f"the snapshot {path}")
    return snapshot


def load_plain(data: bytes, origin: str = "the snapshot") -> Any:
    """The plain data in a pickle or a JSON document. Raises InputError naming `origin`."""
    is_pickle = data[:1] == b"\x80"
    if not is_pickle and data.lstrip()[:1] != b"{":
        raise InputError(
            f"{origin} is neither a pickle of protocol 2 or later nor a JSON object. "
            "Give a file written by harness or by torch.cuda.memory._dump_snapshot()."
        )
    opening = (b"}", b"]") if is_pickle else (b"{", b"[")
    if sum(data.count(byte) for byte in opening) > MAX_CONTAINERS:
        raise InputError(f"{origin} holds more than {MAX_CONTAINERS} dicts and lists.")
    if is_pickle:
        _check_instructions(data, origin)
    # Millions of new containers would have the garbage collector search them again and again.
    collecting = gc.isenabled()
    gc.disable()
    try:
        if not is_pickle:
            return parse_json(data)
        return _PlainUnpickler(io.BufferedReader(io.BytesIO(data))).load()  # type: ignore[arg-type]
    except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError, EOFError) as error:
        raise InputError(f"{origin} is damaged: {error}.") from None
    except RecursionError:
        raise InputError(f"{origin} nests too deep.") from None
    finally:
        if collecting:
            gc.enable()


def _check_instructions(data: bytes, origin: str) -> None:
    """Follow the instructions from the first to STOP without running them."""

    def refuse(position: int, reason: str) -> NoReturn:
        name = _NAMES.get(data[position : position + 1], "an unknown instruction")
        raise InputError(f"{origin}: {name} at byte {position}: {reason}.")

    if data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
        refuse(0, "only pickle protocols 2 to 5 are read")
    position = 2
    while True:
        match = _FIXED_LENGTH.match(data, position)
        assert match is not None  # it matches the empty string
        position = match.end()
        opcode = data[position : position + 1]
        if opcode == b".":
            break
        if position >= len(data):
            raise InputError(f"{origin} is cut short: it ends at byte {len(data)} without STOP.")
        length_bytes = _LENGTH_BYTES.get(opcode)
        if length_bytes is None:
            if opcode in _WITH_ARGUMENT:
                refuse(position, "its argument is cut short or outside what a snapshot uses")
            refuse(position, "a snapshot is plain data and does not need it, so the file is not opened")
        start = position + 1 + length_bytes
        length = int.from_bytes(data[position + 1 : start], "little")
        if start + length > len(data):
            refuse(position, f"{length} bytes announced, more than the file has")
        if opcode == b"\x95":  # the unpickler reads a frame ahead; its instructions follow here
            position = start
        elif length > MAX_STRING_BYTES:
            refuse(position, f"a string of {length} bytes, more than {MAX_STRING_BYTES}")
        else:
            position = start + length
            try:  # the unpickler would let halves of surrogate pairs pass, which cannot be printed
                data[start:position].decode()
            except UnicodeDecodeError:
                refuse(start - 1 - length_bytes, "its string is not UTF-8")
    if position + 1 != len(data):
        refuse(position, f"{len(data) - position - 1} bytes follow the end")


class _PlainUnpickler(pickle.Unpickler):
    """A second lock behind `_check_instructions`: no name in the file leads to an object."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the file")
