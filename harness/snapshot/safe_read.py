"""Read a memory-viz snapshot from a file that may come from anyone.

A pickle is a program. This reader lets only the instructions run that build dicts, lists, strings,
numbers, booleans, None and pairs of small integers, all that a snapshot holds: nothing can be imported or
called. They are checked and counted before the first one runs, by one regular expression, so that a million
events take seconds. Snapshots in JSON are read too: those of snapshot/as_json.py, and the plain structure.
This module imports no torch.
"""

import errno
import io
import pickle
import pickletools
import re
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import InputError
from harness.snapshot.as_json import is_document, snapshot_of_document
from harness.snapshot.shape import validate_snapshot
from harness.system import TooManyValues, collected_by_hand, parse_json, read_whole

MAX_FILE_BYTES = 2**29
MAX_STRING_BYTES = 2**20
MAX_WIDE_BYTES = 2**24
"""The most bytes of non-ASCII strings in a pickle, together: in memory each character may take four bytes."""
MAX_INSTRUCTIONS = 2**26
"""The most instructions of a pickle: enough for a million events, each with a stack of thirty frames. One
instruction fills a place in a list or half of one in a dict, and makes at most one of the objects below."""
MOST_OBJECTS = {
    "dicts and lists": (2**22, b"}])\x86"),
    "numbers": (2**22, b"JM\x8aG"),
    "strings": (2**21, b"\x8cX"),
}
"""How many objects a pickle may make, and the instructions that make them: of the first two an event of
torch's takes 3, of strings 1. They are counted as bytes, which strings and numbers hold too: one in 256 of
those. With the instructions they bound the memory, for 3 bytes of a file make an integer of 32."""
SMALLER = "Record fewer steps, or set a smaller max_entries."
MAX_JSON_BYTES = 2**28
"""The largest snapshot in JSON: one character above U+FFFF makes every character of the text four bytes."""
MAX_JSON_VALUES = 2**23
"""The most values of a snapshot in JSON, as parse_json counts them."""
_RUN = 4096
"""How many instructions one match takes at most; a shorter match is counted by its bytes."""

_LONG1 = rb"\x8a(?:" + b"|".join(re.escape(bytes([n])) + b"." * n for n in range(9)) + rb"|\x09.{8}\x00)"
_INTEGER = rb"(?:K.|J....|M..|" + _LONG1 + rb")"
_SMALL = rb"(?:K.|M..|J...[\x00-\x7f])"
_SHORT = rb"\x8c(?:" + b"|".join(re.escape(bytes([n])) + rb"[\x00-\x7f]{%d}" % n for n in range(32)) + rb")"
_FIXED_LENGTH = (
    # BINGET, LONG_BINGET; EMPTY_LIST, EMPTY_DICT, EMPTY_TUPLE, APPEND(S), SETITEM(S), MARK, NONE, TRUE,
    # FALSE, MEMOIZE; integers from -2**63 to 2**64 - 1, or two small ones and TUPLE2 (any other tuple could
    # nest, and hashing a deep one crashes Python); BINPUT; LONG_BINPUT below 2**24 (the unpickler reserves
    # memory up to the index); BINFLOAT; SHORT_BINUNICODE of a few ASCII characters.
    # A pair or a number can be a key, and dicts are slow where hashes collide: of integers of 64 bits at
    # most 12 have one hash, and of pairs below 2**31 too few to matter. Larger ones can be chosen freely.
    rb"(?:h.|j....|[]})aeus(N\x88\x89\x94]|"
    + _SMALL
    + _SMALL
    + rb"\x86|(?P<half>"
    + _SMALL
    + rb")(?=\x95)|"
    + _INTEGER
    + rb"|q.|r...\x00|G.{8}|"
    + _SHORT
    + rb"){0,%d}+" % _RUN
)
_OTHER_HALF = re.compile(_SMALL + rb"\x86", re.DOTALL)
"""A pair's second integer behind a FRAME: a pickler begins one before any object once 64 KiB are full."""
_LENGTH_BYTES = {b"\x8c": 1, b"X": 4, b"\x95": 8}  # SHORT_BINUNICODE, BINUNICODE, FRAME
_WITH_ARGUMENT = b"hjKJMqrG\x86\x8a"  # admitted above with certain arguments only
_NAMES = {opcode.code.encode("latin1"): opcode.name for opcode in pickletools.opcodes}


def read_snapshot(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """The snapshot in a pickle (protocol 2 to 5) or JSON file, as plain data of checked shape.

    Raises InputError when the file is missing, no regular file, larger than `max_bytes`, cut short,
    holds anything but plain data (naming the instruction and its byte), or is not a snapshot.
    """
    try:
        data = read_whole(path, max_bytes)
    except OSError as error:
        advice = "Give a snapshot.pickle or .json."
        if error.errno == errno.EFBIG:
            advice = SMALLER
        raise InputError(f"cannot read the snapshot {path}: {error.strerror}. {advice}") from None
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
    if is_pickle:
        for kind, (most, opcodes) in MOST_OBJECTS.items():
            if sum(data.count(opcode) for opcode in opcodes) > most:
                raise InputError(f"{origin} holds more than {most:,} {kind}. {SMALLER}")
        _check_instructions(data, origin)
    elif len(data) > MAX_JSON_BYTES:
        raise InputError(f"{origin} is JSON of more than {MAX_JSON_BYTES / 2**20:g} MiB. {SMALLER}")
    try:
        with collected_by_hand():  # millions of new containers would be searched again and again
            if not is_pickle:
                return parse_json(data, MAX_JSON_VALUES)
            return _PlainUnpickler(io.BufferedReader(io.BytesIO(data))).load()  # type: ignore[arg-type]
    except TooManyValues as error:
        raise InputError(f"{origin}: {error}. {SMALLER}") from None
    except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError, EOFError) as error:
        whole = "" if is_pickle else ", or no snapshot at all"
        raise InputError(f"{origin} is damaged{whole}: {error}.") from None
    except RecursionError:
        raise InputError(f"{origin} nests too deep.") from None


def _check_instructions(data: bytes, origin: str) -> None:
    """Follow the instructions from the first to STOP without running them."""

    def refuse(position: int, reason: str) -> NoReturn:
        name = _NAMES.get(data[position : position + 1], "an unknown instruction")
        raise InputError(f"{origin}: {name} at byte {position}: {reason}.")

    instructions = wide = 0
    in_a_pair = False
    if data[1:2] not in (b"\x02", b"\x03", b"\x04", b"\x05"):
        refuse(0, "only pickle protocols 2 to 5 are read")
    position = 2
    fixed_length = re.compile(_FIXED_LENGTH, re.DOTALL)  # a tenth of a second, and most commands read none
    while True:
        instructions += 1
        while (run := fixed_length.match(data, position)) and (end := run.end()) > position:
            instructions += min(end - position, _RUN)  # a shorter run has at most as many as bytes
            position = end
            in_a_pair = run.end("half") == end
            if instructions > MAX_INSTRUCTIONS:
                raise InputError(f"{origin} holds more than {MAX_INSTRUCTIONS:,} instructions. {SMALLER}")
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
            other = _OTHER_HALF.match(data, start) if in_a_pair else None
            position = other.end() if other else start
        elif length > MAX_STRING_BYTES:
            refuse(position, f"a string of {length} bytes, more than {MAX_STRING_BYTES}")
        else:
            position = start + length
            try:  # the unpickler would let halves of surrogate pairs pass, which cannot be printed
                wide += 0 if data[start:position].decode().isascii() else length
            except UnicodeDecodeError:
                refuse(start - 1 - length_bytes, "its string is not UTF-8")
            if wide > MAX_WIDE_BYTES:
                raise InputError(f"{origin} holds more than {MAX_WIDE_BYTES:,} bytes of text beyond ASCII.")
        in_a_pair = False
    if position + 1 != len(data):
        refuse(position, f"{len(data) - position - 1} bytes follow the end")


class _PlainUnpickler(pickle.Unpickler):  # noqa: TID251  # behind a check, and it finds no names
    """A second lock behind `_check_instructions`: no name in the file leads to an object."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the file")
