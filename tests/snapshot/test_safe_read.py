"""Hostile files are refused, harmless ones read, and nothing in a file ever runs."""

import contextlib
import copyreg
import functools
import gc
import io
import json
import os
import pickle
import pickletools
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.run_folder import run_folder
from harness.snapshot import AllocationSpan, snapshot_of_storages, write_snapshot
from harness.snapshot import safe_read as safe_pickle
from harness.snapshot import shape as snapshot_shape
from harness.snapshot.safe_read import load_plain, read_snapshot
from harness.snapshot.shape import validate_snapshot
from harness.step_profile import step_profile
from harness.sweep import document as sweep_document
from harness.system import strict_json, strict_yaml
from tests.support.places import ROOT
from tests.support.trust_report import Tried


def snapshot() -> dict[str, Any]:
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    spans = [
        AllocationSpan(1, 2**33, 0, None, "forward", frames=frames),
        AllocationSpan(2, 512, 1, 2, "forward", "backward", frames=frames),
    ]
    return snapshot_of_storages(spans)


class Canary:
    """Unpickling an instance the ordinary way makes a file: the proof that code ran."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


class Stateful:
    def __getstate__(self) -> dict[str, int]:
        return {"a": 1}


class WithNewArguments:
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"a": 1}

    def __new__(cls, **_: int) -> "WithNewArguments":
        return super().__new__(cls)


class Persistent(pickle.Pickler):
    def persistent_id(self, obj: Any) -> str | None:
        return "elsewhere" if isinstance(obj, set) else None


def by_id(protocol: int) -> bytes:
    buffer = io.BytesIO()
    Persistent(buffer, protocol).dump([{1}])
    return buffer.getvalue()


def text(string: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(string)) + string


def calls(path: str) -> dict[str, bytes]:
    """Pickles that make `path` when loaded the ordinary way, by every instruction that can call."""
    name, command = text(path.encode()), text(f"touch '{path}'".encode())
    system = b"cos\nsystem\n"
    pickled = {f"reduce, protocol {n}": pickle.dumps({"segments": Canary()}, n) for n in range(6)}
    return pickled | {
        "GLOBAL REDUCE": b"\x80\x02" + system + command + b"\x85R.",
        "STACK_GLOBAL REDUCE": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + command + b"\x85R.",
        "STACK_GLOBAL from memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x940h\x00h\x01\x93"
        + command
        + b"\x85R.",
        "INST": b"\x80\x02(" + command + b"ios\nsystem\n.",
        "INST without PROTO": b"(S'touch " + path.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"\x80\x02(" + system + command + b"o.",
        "REDUCE of open": b"\x80\x02cbuiltins\nopen\n" + name + b"X\x01\x00\x00\x00w\x86R.",
        "REDUCE of eval": b"\x80\x02cbuiltins\neval\n" + text(f"open({path!r}, 'w')".encode()) + b"\x85R.",
        "lambda's code": b"\x80\x02cbuiltins\nexec\n"
        + text(f"(lambda: open({path!r}, 'w'))()".encode())
        + b"\x85R.",
        "inside a snapshot": pickle.dumps({**snapshot(), "device_traces": [[Canary()]]}, 4),
        "as a dict key": b"\x80\x02}" + system + command + b"\x85RK\x01s.",
        "in a second frame": b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00}0\x95"
        + bytes(8)
        + system
        + command
        + b"\x85R.",
    }


NOT_PLAIN = {
    "GLOBAL alone": b"\x80\x02cos\nsystem\n.",
    "STACK_GLOBAL of os.system": pickle.dumps(os.system, 4),
    "a function": pickle.dumps(json.dumps, 4),
    "functools.partial": pickle.dumps(functools.partial(print, 1), 4),
    "BUILD": pickle.dumps(Stateful(), 2),
    "NEWOBJ": pickle.dumps(Stateful(), 4),
    "NEWOBJ_EX": pickle.dumps(WithNewArguments(), 4),
    "BUILD on data": b"\x80\x02}}b.",
    "REDUCE on data": b"\x80\x02})R.",
    "EXT1": b"\x80\x02\x82\xf0.",
    "EXT2": b"\x80\x02\x83\xf0\xf0.",
    "EXT4": b"\x80\x02\x84\xf0\xf0\xf0\x70.",
    "PERSID": by_id(0),
    "BINPERSID": by_id(4),
    "EMPTY_SET": pickle.dumps({"segments": {1, 2}}, 4),
    "frozenset": pickle.dumps(frozenset([1]), 4),
    "SHORT_BINBYTES": pickle.dumps({"a": b"bytes"}, 4),
    "bytearray (BYTEARRAY8)": pickle.dumps({"a": bytearray(9)}, 5),
    "NEXT_BUFFER": b"\x80\x05\x97.",
    "READONLY_BUFFER": b"\x80\x05\x97\x98.",
    "complex": pickle.dumps({"a": 1j}, 4),
    "protocol 0 data": pickle.dumps({"segments": []}, 0),
    "protocol 1 data": pickle.dumps({"segments": []}, 1),
    "protocol 6": b"\x80\x06}.",
    "PROTO twice": b"\x80\x02\x80\x02}.",
    "no such instruction": b"\x80\x02\xff.",
    "POP": b"\x80\x02}}0.",
    "DUP": b"\x80\x02}2.",
    "text INT": b"\x80\x02I99999\n.",
    "text LONG of a million digits": b"\x80\x02L" + b"9" * 10**6 + b"L\n.",
    "LONG4": pickle.dumps(1 << 10**6, 2),
    "LONG1 of 255 bytes": b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
    "PUT far out": b"\x80\x02}p4294967295\n.",
    "LONG_BINPUT that reserves 64 GiB": b"\x80\x02}r\xff\xff\xff\xff.",
    "deep tuple as a key": b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s.",
    "pair of integers that could be chosen to collide": b"\x80\x02" + pickle.dumps((2**40, 7), 2)[2:],
    "pair with a negative integer": pickle.dumps((-1, 0), 2),
    "integer of 72 bits": b"\x80\x02\x8a\x09" + b"\xff" * 8 + b"\x01.",
    "tuple of tuples": b"\x80\x02K\x01K\x02\x86K\x03\x86.",
    "BINUNICODE of 4 GiB": b"\x80\x02X\xff\xff\xff\xffabc.",
    "BINUNICODE8 of 2**40": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"abc.",
    "BINBYTES8 of 2**40": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"abc.",
    "BYTEARRAY8 of 2**40": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
    "FRAME of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
    "FRAME of 2**64 - 1": b"\x80\x04\x95" + b"\xff" * 8 + b"}.",
    "a long string": b"\x80\x02" + text(b"a" * (2**20 + 1)) + b".",
    "string that is not UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
    "half of a surrogate pair": b"\x80\x02" + text(b"\xed\xa0\x80") + b".",
    "half of a surrogate pair, short": b"\x80\x04\x8c\x03\xed\xa0\x80.",
    "a call after a false end": b"\x80\x02}.\x80\x02cos\ngetcwd\n)R.",
    "bytes after the end": pickle.dumps({}, 4) + b"\x00",
    "memo index that is not there": b"\x80\x02h\x07.",
    "empty stack": b"\x80\x02s.",
    "SETITEMS with a key and no value": b"\x80\x02}(K\x01u.",
    "APPENDS without MARK": b"\x80\x02]K\x01e.",
    "APPEND to a dict": b"\x80\x02}K\x01a.",
    "SETITEM of a dict as a key": b"\x80\x02}}K\x01s.",
    "STOP on nothing": b"\x80\x02.",
    "nothing": b"",
    "only PROTO": b"\x80\x04",
    "PROTO without its version": b"\x80",
    "a zip file": b"PK\x03\x04",
    "JSON cut short": b'{"segments": [',
    "JSON list": b"[]",
    "JSON nested a million deep": b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
    "JSON that is not UTF-8": b'{"\xff": 1}',
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_data_is_refused(name: str, tried: Tried) -> None:
    tracemalloc.start()
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        load_plain(NOT_PLAIN[name], "snapshot.pickle")
    assert time.process_time() - start < 2
    assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    tracemalloc.stop()
    assert "snapshot.pickle" in str(caught.value)
    assert len(str(caught.value)) < 400
    tried(
        "Hostile pickles",
        "GLOBAL, BUILD, NEWOBJ, EXT1/2/4, PERSID, BINPERSID, buffers, protocols 0, 1 and 6, lies about "
        "lengths and frames, memo indices out of reach, deep nesting, damaged files",
        "refused, the instruction and its byte named; under 2 s and 64 MiB",
    )


NAMED = (
    *("GLOBAL alone", "STACK_GLOBAL of os.system", "BUILD on data", "REDUCE on data", "EXT2", "BINPERSID"),
    *("EMPTY_SET", "SHORT_BINBYTES", "BYTEARRAY8 of 2**40", "NEXT_BUFFER", "FRAME of 2**62"),
    "LONG_BINPUT that reserves 64 GiB",
)
"""Of NOT_PLAIN, those that begin with the instruction that is refused."""


@pytest.mark.parametrize("name", NAMED)
def test_the_instruction_and_its_byte_are_named(name: str) -> None:
    data, opcode = NOT_PLAIN[name], name.partition(" ")[0]
    code = next(op.code for op in pickletools.opcodes if op.name == opcode).encode("latin1")
    with pytest.raises(InputError, match=f"{opcode} at byte {data.index(code)}:"):
        load_plain(data)


def test_nothing_in_a_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried) -> None:
    canary = tmp_path / "canary"
    monkeypatch.setattr(Canary, "path", str(canary))
    armed = calls(str(canary))
    for name, data in armed.items():
        path = tmp_path / "hostile.pickle"
        path.write_bytes(data)
        with pytest.raises(InputError):
            read_snapshot(path)
        assert not canary.exists(), name
        # The test is worth something only if the file is armed.
        with contextlib.suppress(Exception):  # some fail after they ran
            pickle.loads(data)
        assert canary.exists(), name
        canary.unlink()
    tried(
        "Hostile pickles",
        "armed files of protocols 0 to 5: REDUCE, GLOBAL, STACK_GLOBAL, INST, OBJ, in keys, frames and "
        "snapshots (Python's own unpickler runs each)",
        "refused; nothing ran",
        times=len(armed),
    )


def test_the_second_lock_holds_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried) -> None:
    """With the check of instructions taken away, the unpickler still calls nothing."""
    canary = tmp_path / "canary"
    monkeypatch.setattr(Canary, "path", str(canary))
    monkeypatch.setattr(safe_pickle, "_check_instructions", lambda *_: None)
    for name, data in calls(str(canary)).items():
        with pytest.raises(InputError):
            load_plain(data)
        assert not canary.exists(), name
    with pytest.raises(InputError, match=r"os\.system"):
        load_plain(NOT_PLAIN["GLOBAL alone"])
    with pytest.raises(InputError, match="outside the file"):
        load_plain(NOT_PLAIN["BINPERSID"])
    fault = "the same files, with the check of instructions taken away"
    tried("Hostile pickles", fault, "refused by the unpickler; nothing ran", times=len(calls("")))


def test_extension_registry_is_out_of_reach(tmp_path: Path) -> None:
    # The unpickler takes what is in this cache without asking find_class: only the first lock stops it.
    copyreg.add_extension("os", "system", 240)
    try:
        pickle.loads(b"\x80\x02\x82\xf0.")  # fills the cache
        with pytest.raises(InputError, match="EXT1 at byte 2"):
            load_plain(b"\x80\x02\x82\xf0" + text(f"touch {tmp_path}/canary".encode()) + b"\x85R.")
        assert list(tmp_path.iterdir()) == []
    finally:
        copyreg.remove_extension("os", "system", 240)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_it_is(protocol: int) -> None:
    shared = [{"filename": "ä.py", "line": 7, "name": "f" * 300}]
    data = {
        "numbers": [0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**47, 2**63, -(2**63), 1.5],
        "others": [None, True, False, "", "x" * 70_000],
        "pools": [(0, 0), (2**31 - 1, 7)],
        "shared": [shared, shared],
        "many": [{"i": i} for i in range(3000)],
    }
    read = load_plain(pickle.dumps(data, protocol))
    assert read == data
    assert read["shared"][0] is read["shared"][1]
    assert load_plain(b"\x80\x02}(K\x01K\x02K\x01K\x03u.") == {1: 3}  # a key twice: the last holds


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_cut_anywhere_is_refused(protocol: int, tried: Tried) -> None:
    data = pickle.dumps(snapshot(), protocol)
    for length in range(len(data)):
        with pytest.raises(InputError):
            load_plain(data[:length])
    assert load_plain(data) == snapshot()
    fault = "a good snapshot of protocol 2 to 5, cut off at every byte"
    tried("Hostile pickles", fault, "refused", times=len(data))


def test_a_file_with_any_byte_changed_never_fails_but_as_bad_input() -> None:
    data = pickle.dumps(snapshot(), 4)
    refused = 0
    for position in range(0, len(data), 2):
        for value in (0, 0x52, 0x7F, 0xFF, data[position] ^ 1):
            try:
                validate_snapshot(load_plain(data[:position] + bytes([value]) + data[position + 1 :]))
            except InputError:
                refused += 1
    assert refused > len(data)  # 5 changes at every second byte: most of them break the file


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def doubling(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


FRAME = {"filename": "a.py", "line": 1, "name": "f"}
ALLOC = {"action": "alloc", "addr": 0, "size": 1}
BLOCK = {"size": 512, "state": "inactive"}
SEGMENT = {"address": 0, "total_size": 512, "blocks": [BLOCK]}
EMPTY: dict[str, Any] = {"segments": [], "device_traces": []}


def traced(*entries: Any) -> dict[str, Any]:
    """A snapshot with one trace."""
    return {**EMPTY, "device_traces": [[*entries]]}


def held(segment: dict[Any, Any] = SEGMENT, **block: Any) -> dict[str, Any]:
    """A snapshot with one segment; with fields of its one block."""
    return {**EMPTY, "segments": [segment | {"blocks": [BLOCK | block]} if block else segment]}


BAD_SHAPES: dict[str, tuple[Any, str]] = {
    "a list": ([], "the top level"),
    "no segments": ({"device_traces": []}, "segments"),
    "no traces": ({"segments": []}, "device_traces"),
    "segments as a dict": ({**EMPTY, "segments": {}}, "segments"),
    "a trace that is no list": ({**EMPTY, "device_traces": [1]}, r"device_traces\[0\]"),
    "an entry that is no dict": ({**EMPTY, "device_traces": [[], [1]]}, r"device_traces\[1\]\[0\]"),
    "an entry without action": (traced({}), "an action"),
    "an entry without size": (
        traced({"action": "alloc", "addr": 1}),
        r"device_traces\[0\]\[0\]\['size'\]",
    ),
    "an entry without addr": (traced({"action": "alloc", "size": 1}), "'addr'"),
    "an oom without device_free": (traced({"action": "oom", "size": 1, "addr": 1}), "'device_free'"),
    "a negative size": (traced(ALLOC, {**ALLOC, "size": -1}), r"\[1\]\['size'\]"),
    "true as a size": (traced({**ALLOC, "size": True}), "'size'"),
    "a float address": (traced({**ALLOC, "addr": 1.5}), "'addr'"),
    "metadata that is no text": (traced({**ALLOC, "user_metadata": 3}), "metadata"),
    "frames that are no list": (traced({**ALLOC, "frames": "a.py"}), "frames"),
    "frames that are null": (traced({**ALLOC, "frames": None}), "frames"),
    "deep beside no frames": (traced({**ALLOC, "frames": (), "more": nested(200)}), "deep"),
    "a frame without line": (traced({**ALLOC, "frames": [{"filename": "a", "name": "b"}]}), "frames"),
    "a frame that nests": (traced({**ALLOC, "frames": [{**FRAME, "more": [1]}]}), "frames"),
    "a segment without blocks": (held({"address": 0, "total_size": 0}), "blocks"),
    "a block without state": (
        held({**SEGMENT, "blocks": [{"size": 512}]}),
        r"segments\[0\]\['blocks'\]\[0\]\['state'\]",
    ),
    "a block whose category is no text": (
        held(category=7),
        r"segments\[0\]\['blocks'\]\[0\]\['category'\]",
    ),
    "blocks that do not fill": (held({**SEGMENT, "total_size": 1024}), "exactly"),
    "deep": ({**EMPTY, "more": nested(200)}, "deep"),
    "deep in an entry": (traced({**ALLOC, "more": nested(200)}), "deep"),
    "deep in a segment": (held({**SEGMENT, "more": nested(200)}), "deep"),
    "deep in a block": (held(more=nested(200)), "deep"),
    "a pair as a key": ({**EMPTY, "more": [{(1, 2): 1}]}, "keys"),
    "a number as a key": ({**EMPTY, 7: 1}, "keys should be strings"),
    "a number as a key of an entry": (traced(ALLOC, {**ALLOC, None: 1}), r"device_traces\[0\]\[1\]'s keys"),
    "a number as a key of a segment": (held({**SEGMENT, 1: 1}), "keys"),
    "a number as a key of a block": (held({**SEGMENT, "blocks": [{**BLOCK, 1.5: 1}]}), "keys"),
    "a number as a key of a frame": (traced({**ALLOC, "frames": [{**FRAME, 1: 1}]}), "keys"),
    "a list in itself": ({**EMPTY, "more": itself()}, "deep"),
    "a trace in itself": ({**EMPTY, "device_traces": [itself()]}, r"device_traces\[0\]\[0\]"),
    "frames in themselves": (traced({**ALLOC, "frames": itself()}), "frames"),
}


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_what_is_no_snapshot_is_refused_and_the_place_named(name: str, tmp_path: Path) -> None:
    data, place = BAD_SHAPES[name]
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(data, 4))
    with pytest.raises(InputError, match=place):
        read_snapshot(path)


def test_shared_lists_cannot_stand_for_more_than_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    monkeypatch.setattr(snapshot_shape, "MAX_ENTRIES", 10_000)
    trace = [ALLOC] * 101
    bombs = [
        {**EMPTY, "more": doubling(60)},
        {**EMPTY, "device_traces": [trace] * 100},
        {**EMPTY, "segments": [{"address": 0, "total_size": 101 * 512, "blocks": [BLOCK] * 101}] * 100},
    ]
    for bomb in bombs:
        path = tmp_path / "bomb.pickle"
        path.write_bytes(pickle.dumps(bomb, 4))
        with pytest.raises(InputError, match="fewer than 10000 entries"):
            read_snapshot(path)
    validate_snapshot({**EMPTY, "device_traces": [trace] * 99})
    fault = "memo bombs: shared lists that stand for 2**60 and more values"
    tried(
        "Hostile pickles", fault, "refused by the count of entries, before they are walked", times=len(bombs)
    )


def test_a_million_nested_lists_do_not_crash(tmp_path: Path) -> None:
    path = tmp_path / "deep.pickle"
    deep = b"]" * 10**6 + b"a" * (10**6 - 1)
    path.write_bytes(
        b"\x80\x02}(" + text(b"segments") + b"]" + text(b"device_traces") + b"]" + text(b"x") + deep + b"u."
    )
    with pytest.raises(InputError, match="deep"):
        read_snapshot(path)


MANY = {
    "dicts and lists": (b"}" * 101, b"]" * 101, b"K\x01K\x02\x86" * 101),
    "numbers": (b"M\x00\x01" * 101, b"J\0\0\1\0" * 101, b"\x8a\x03\0\0\1" * 101, (b"G" + bytes(8)) * 101),
    "strings": (b"\x8c\x02ab" * 101, (b"\x8c\x20" + b"a" * 32) * 101, text(b"ab") * 101),
    "instructions": (b"N" * 5000, b"h\0" * 5000, b"\x88" * 4097 + text(b"a") + b"\x89" * 4000),
}


@pytest.mark.parametrize("kind", MANY)
def test_many_objects_are_refused_before_any_is_made(
    kind: str, monkeypatch: pytest.MonkeyPatch, tried: Tried
) -> None:
    few = {name: (100, opcodes) for name, (_, opcodes) in safe_pickle.MOST_OBJECTS.items()}
    monkeypatch.setattr(safe_pickle, "MOST_OBJECTS", few)
    monkeypatch.setattr(safe_pickle, "MAX_INSTRUCTIONS", 4500 if kind == "instructions" else 2**20)
    monkeypatch.setattr(safe_pickle._PlainUnpickler, "load", lambda _: pytest.fail("it was read"))
    for body in MANY[kind]:
        with pytest.raises(InputError, match=f"more than .* {kind}"):
            load_plain(b"\x80\x02](" + body + b"e.")
    tried(
        "Hostile pickles",
        "one value more than the bounds on dicts, lists, pairs, numbers, strings and instructions",
        "refused before the first is made",
        times=len(MANY[kind]),
    )


def test_as_many_as_the_bounds_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: (100, opcodes) for name, (_, opcodes) in safe_pickle.MOST_OBJECTS.items()}
    monkeypatch.setattr(safe_pickle, "MOST_OBJECTS", few)
    monkeypatch.setattr(safe_pickle, "MAX_JSON_BYTES", 8)
    assert len(load_plain(b"\x80\x02](" + b"]" * 99 + b"e.")) == 99  # and the list they are in
    assert len(load_plain(b"\x80\x02](" + b"M\x00\x01" * 100 + b"e.")) == 100
    assert len(load_plain(b"\x80\x02](" + b"\x8c\x02ab" * 100 + b"e.")) == 100
    assert load_plain(b'{"a": 1}') == {"a": 1}


def test_text_beyond_ascii_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One such character makes four bytes of every character of its string."""
    monkeypatch.setattr(safe_pickle, "MAX_WIDE_BYTES", 100)
    wide, plain = text(b"\xf0\x9f\x98\x80" + b"a" * 46), text(b"a" * 50)
    assert len(load_plain(b"\x80\x02](" + wide * 2 + plain * 9 + b"e.")) == 11
    with pytest.raises(InputError, match="more than 100 bytes of text beyond ASCII"):
        load_plain(b"\x80\x02](" + wide * 3 + b"e.")


def test_a_million_events_as_torch_dumps_them_are_within_the_bounds() -> None:
    """Counted for a few thousand, each with a stack of its own thirty lines of known code."""
    lines = [{"name": f"f{n}", "filename": f"/site-packages/part_{n}.py", "line": n} for n in range(3000)]
    trace = [
        {
            "action": "alloc" if n % 2 else "free_completed",
            "addr": 0x7F00_0000_0000 + 512 * n,
            "size": 70_000 + 512 * n,
            "stream": 0,
            "time_us": 1_795_357_579_187_945 + n,
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": (0, 0),
            "frames": lines[n % 2900 : n % 2900 + 30],
        }
        for n in range(20_000)
    ]
    data = pickle.dumps({"segments": [], "device_traces": [trace]}, 4)
    assert load_plain(data)["device_traces"] == [trace]
    million = 1_000_000 / len(trace)
    assert len(data) * million < safe_pickle.MAX_FILE_BYTES
    assert sum(1 for _ in pickletools.genops(data)) * million < safe_pickle.MAX_INSTRUCTIONS
    for most, opcodes in safe_pickle.MOST_OBJECTS.values():
        assert sum(data.count(opcode) for opcode in opcodes) * million < most


def test_security_md_says_the_bounds() -> None:
    """The numbers there are those of the code."""
    said = " ".join((ROOT / "SECURITY.md").read_text().split())
    most = {name: number for name, (number, _) in safe_pickle.MOST_OBJECTS.items()}
    for number, words in (
        (most["dicts and lists"], "2**22 dicts and lists"),
        (most["numbers"], "2**22 numbers"),
        (most["strings"], "2**21 strings"),
        (safe_pickle.MAX_INSTRUCTIONS, "2**26 instructions"),
        (safe_pickle.MAX_JSON_VALUES, "2**23 in a snapshot as JSON"),
        (step_profile.MAX_VALUES, "2**20 in a profile"),
        (strict_json.MAX_VALUES, "2**18 elsewhere"),
    ):
        assert words in said
        assert number == 2 ** int(words.split()[0].removeprefix("2**"))
    for number, words in (
        (safe_pickle.MAX_FILE_BYTES, "at most 512 MiB"),
        (safe_pickle.MAX_WIDE_BYTES, "16 MiB of them beyond ASCII"),
        (safe_pickle.MAX_JSON_BYTES, "at most 256 MiB"),
        (step_profile.MAX_FILE_BYTES, "16 MiB for a profile"),
        (sweep_document.MAX_FILE_BYTES, "64 MiB for a sweep"),
        (run_folder.MAX_LOG_BYTES, "256 MiB for a log"),
    ):
        assert words in said
        size, unit = words.removeprefix("at most ").split()[:2]
        assert number == int(size) * {"MiB": 2**20, "GiB": 2**30}[unit]
    assert (strict_yaml.MAX_FILE_BYTES, strict_yaml.MAX_NODES) == (1_000_000, 10_000)
    assert "1 MB for recipes and configs" in said
    assert "10,000 in YAML" in said


def test_a_string_may_be_as_long_as_said() -> None:
    longest = "a" * safe_pickle.MAX_STRING_BYTES
    assert load_plain(b"\x80\x02" + text(longest.encode()) + b".") == longest
    with pytest.raises(InputError, match="a string of 1048577 bytes, more than 1048576"):
        load_plain(b"\x80\x02" + text(b"a" + longest.encode()) + b".")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x06}.", "only pickle protocols 2 to 5"),
        (b"\x80\x04}", "cut short: it ends at byte 3 without STOP"),
        (b"\x80\x04", "cut short: it ends at byte 2 without STOP"),
        (b"\x80\x02}r\xff\xff\xff\xff.", "LONG_BINPUT at byte 3: its argument is cut short or outside"),
        (b"\x80\x02\x8c\x03\xed\xa0\x80.", "at byte 2: its string is not UTF-8"),
        (b"\x80\x02" + text(b"\xff") + b".", "BINUNICODE at byte 2: its string is not UTF-8"),
        (b"\x80\x02N." + b"abc", "STOP at byte 3: 3 bytes follow the end"),
    ],
)
def test_why_a_file_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_plain(data)


def test_json_is_bounded_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_pickle, "MAX_JSON_VALUES", 100)
    with pytest.raises(InputError, match=r"more than 100 values\. Record fewer steps"):
        load_plain(b'{"a":[' + b"[]," * 101 + b"0]}")
    monkeypatch.setattr(safe_pickle, "MAX_JSON_BYTES", 1000)
    with pytest.raises(InputError, match="JSON of more than"):
        load_plain(b'{"a": 1}' + b" " * 1000)


def test_runs_of_instructions_are_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event takes sixty instructions, and a million of them are within the bound."""
    body = b"j\0\0\0\0" * 40_000  # five bytes each
    monkeypatch.setattr(safe_pickle, "MAX_INSTRUCTIONS", 40_000 + safe_pickle._RUN)
    safe_pickle._check_instructions(b"\x80\x02](" + body + b"e.", "snapshot")
    monkeypatch.setattr(safe_pickle, "MAX_INSTRUCTIONS", 39_999)
    with pytest.raises(InputError, match="39,999 instructions"):
        safe_pickle._check_instructions(b"\x80\x02](" + body + b"e.", "snapshot")


def colliding_pairs(count: int) -> list[tuple[int, int]]:
    """Pairs of integers below 2**61 with one hash: that of a tuple is a sum over its items, which can be
    solved for the second (Objects/tupleobject.c, xxHash without the last mix of the length)."""
    prime_1, prime_2, prime_5, bits = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64
    inverse, wanted, found = pow(prime_2, -1, bits), 0x1234567890ABCDEF, list[tuple[int, int]]()
    for first in range(1, 100 * count):
        mixed = (prime_5 + first * prime_2) % bits
        mixed = ((mixed << 31 | mixed >> 33) % bits * prime_1) % bits
        second = (wanted - mixed) * inverse % bits
        if second < 2**61 - 1:
            found.append((first, second))
        if len(found) == count:
            break
    return found


def test_keys_cannot_be_chosen_to_collide(tried: Tried) -> None:
    pairs = colliding_pairs(1000)
    assert len({hash(pair) for pair in pairs}) == 1  # the attack is real
    with pytest.raises(InputError, match="TUPLE2 at byte"):
        load_plain(pickle.dumps(dict.fromkeys(pairs), 4))
    # integers collide modulo 2**61 - 1, of which 64 bits hold few
    multiples = [number * (2**61 - 1) for number in range(-512, 512)]
    assert len({hash(number) for number in multiples}) == 1
    with pytest.raises(InputError, match="LONG1 at byte"):
        load_plain(pickle.dumps(dict.fromkeys(multiples), 4))
    tried(
        "Hostile pickles",
        "keys chosen to collide, which make a dict of 50,000 of them take hours: pairs of integers, integers",
        "refused before the dict is made",
        times=2,
    )


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_left_as_it_was(collecting: bool) -> None:
    was = gc.isenabled()
    (gc.enable if collecting else gc.disable)()
    try:
        load_plain(pickle.dumps({}, 4))
        with pytest.raises(InputError):
            load_plain(b"\x80\x02s.")
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if was else gc.disable)()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(bytes(1001))
    for name, reason in [("missing", "No such file"), (".", "a folder"), ("fifo", "not a regular file")]:
        with pytest.raises(InputError, match=reason) as caught:
            read_snapshot(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(InputError, match=r"has 1,001 bytes, and at most 1,000 are read\. Record fewer"):
        read_snapshot(tmp_path / "large", max_bytes=1000)


def test_pickle_and_json_give_the_same_snapshot(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "a.pickle", snapshot())
    (tmp_path / "a.json").write_text(json.dumps(snapshot(), indent=1))
    from_pickle, from_json = read_snapshot(tmp_path / "a.pickle"), read_snapshot(tmp_path / "a.json")
    assert json.loads(json.dumps(from_pickle)) == from_json
    assert from_pickle == snapshot()


def test_a_pair_that_a_new_frame_divides_is_read():
    """A pickler begins one before any object as soon as 64 KiB are full: before the second of a pair too."""
    divided = set()
    for padding in range(12):
        written = [
            [f"{number:0100}" for number in range(620)],
            "p" * padding,
            [(n % 9, 300) for n in range(400)],
        ]
        data = pickle.dumps(written, protocol=4)
        names = [opcode.name for opcode, _, _ in pickletools.genops(data)]
        at = names.index("FRAME", 10)
        divided.add(tuple(names[at - 2 : at + 3]))
        assert load_plain(data) == written
    assert ("MEMOIZE", "BININT1", "FRAME", "BININT2", "TUPLE2") in divided


@pytest.mark.parametrize(
    "before",
    [
        b"\x8c\x04K\x01K\x02",  # the numbers are characters of a string
        b"K\x01\x8a\x08" + b"\x7f" * 8,  # a number that can be chosen freely
        b"K\x01]",
        b"K\x01K\x02\x95" + bytes(8) + b"\x8c\x01a",
        b"]K\x01",
    ],
)
def test_what_a_frame_divides_is_no_other_tuple(before: bytes):
    data = b"\x80\x04" + before + b"\x95" + struct.pack("<Q", 2) + b"\x86."
    with pytest.raises(InputError, match="TUPLE2 at byte"):
        load_plain(data)
