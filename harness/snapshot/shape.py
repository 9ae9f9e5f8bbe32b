"""What a memory snapshot must look like before anything reads it. This module imports no torch."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from harness.errors import InputError

MAX_DEPTH = 100
MAX_ENTRIES = 2**25
"""The most that a snapshot may hold of trace entries, blocks, and values in parts that this project does not
read, together. Lists may be shared, so a small file can describe more than any memory holds."""
LARGEST = 2**63 - 1
"""torch counts bytes, addresses and microseconds in 64 bits with a sign, and so do the reports."""
_SEGMENT_TYPES = {
    **dict.fromkeys(("device", "stream", "allocated_size", "active_size", "requested_size"), int),
    "segment_type": str,
    "is_expandable": bool,
}
_BLOCK_TYPES = {"address": int, "requested_size": int, "category": str}
_IN_WORDS = {int: "an integer of 64 bits", str: "a string", bool: "true or false"}
_can_nest = frozenset((dict, list)).__contains__  # the only tuples are pairs of integers: pool ids


def is_dict(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether it is a dict itself, and nothing that is made of one."""
    return type(value) is dict


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether it is a list itself."""
    return type(value) is list


def validate_snapshot(snapshot: Any, origin: str = "snapshot") -> None:
    """Check that plain data has the shape torch.cuda.memory._snapshot() gives.

    Raises InputError naming the first thing that is missing or wrong and where it is. Passing means
    that segments and traces can be walked without surprise, and that nothing nests without end.
    """
    check = _Check(origin)
    check.require(is_dict(snapshot), "the top level", "a dict with segments and device_traces")
    check.keys("the top level", snapshot)
    for key in ("segments", "device_traces"):
        check.require(is_list(snapshot.get(key)), key, "a list")
    check.count(sum(len(trace) for trace in snapshot["device_traces"] if is_list(trace)))
    for i, segment in enumerate(snapshot["segments"]):
        check.segment(f"segments[{i}]", segment)
    for device, trace in enumerate(snapshot["device_traces"]):
        check.require(is_list(trace), f"device_traces[{device}]", "a list")
        for i, entry in enumerate(trace):
            check.trace_entry(device, i, entry)
    settings = snapshot.get("allocator_settings", {})
    check.require(is_dict(settings), "allocator_settings", "a dict")
    check.optional("allocator_settings", settings, {"PYTORCH_CUDA_ALLOC_CONF": str})
    check.rest("the top level", (v for k, v in snapshot.items() if k not in ("segments", "device_traces")))


class _Check:
    """The state of one validation: stacks already seen (they are shared), and what may still be counted."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        self.entries_left = MAX_ENTRIES
        self.seen_frames: set[int] = set()
        self.seen_keys: set[tuple[Any, ...]] = set()
        self.seen_stacks: set[int] = set()

    def require(self, holds: bool, where: str, what: str) -> None:
        if not holds:
            raise InputError(
                f"{self.origin} is not a memory snapshot: {where} should be {what}. "
                "Give a file written by harness or by torch.cuda.memory._dump_snapshot()."
            )

    def count(self, entries: int) -> None:
        self.entries_left -= entries
        self.require(self.entries_left >= 0, "its content", f"fewer than {MAX_ENTRIES} entries")

    def keys(self, where: str, holder: dict[Any, Any]) -> None:
        keys = tuple(holder)  # a million entries have a handful of different ones
        if keys not in self.seen_keys:
            self.require(all(type(key) is str for key in keys), f"{where}'s keys", "strings")
            self.seen_keys.add(keys)

    def size(self, where: str, holder: dict[Any, Any], *keys: str) -> None:
        for key in keys:
            value = holder.get(key)
            right = type(value) is int and 0 <= value <= LARGEST
            self.require(right, f"{where}[{key!r}]", "an integer from 0 to 2**63 - 1")

    def optional(self, where: str, holder: dict[Any, Any], types: Mapping[str, type]) -> None:
        for key, kind in types.items():
            value = holder.get(key)
            small = not isinstance(value, int) or -LARGEST <= value <= LARGEST
            self.require(
                key not in holder or (type(value) is kind and small), f"{where}[{key!r}]", _IN_WORDS[kind]
            )

    def segment(self, where: str, segment: Any) -> None:
        self.require(is_dict(segment), where, "a dict")
        self.keys(where, segment)
        self.size(where, segment, "address", "total_size")
        self.optional(where, segment, _SEGMENT_TYPES)
        blocks = segment.get("blocks")
        self.require(is_list(blocks), f"{where}['blocks']", "a list")
        self.count(1 + len(blocks))
        for i, block in enumerate(blocks):
            inside = f"{where}['blocks'][{i}]"
            self.require(is_dict(block), inside, "a dict")
            self.keys(inside, block)
            self.size(inside, block, "size")
            self.require(type(block.get("state")) is str, f"{inside}['state']", "a string")
            self.optional(inside, block, _BLOCK_TYPES)
            self.frames(inside, block)
            self.rest(inside, (v for k, v in block.items() if k != "frames"))
        self.require(
            sum(block["size"] for block in blocks) == segment["total_size"],
            where,
            "filled by its blocks exactly",
        )
        self.frames(where, segment)
        self.rest(where, (v for k, v in segment.items() if k not in ("blocks", "frames")))

    def trace_entry(self, device: int, i: int, entry: Any) -> None:
        # A million entries: the text that says where is only put together when something is wrong.
        if not is_dict(entry) or type(entry.get("action")) is not str:
            self.require(False, f"device_traces[{device}][{i}]", "a dict with an action")
        if tuple(entry) not in self.seen_keys:
            self.keys(f"device_traces[{device}][{i}]", entry)
        place = "device_free" if entry["action"] == "oom" else "addr"
        for key, value in ("size", entry.get("size")), (place, entry.get(place)):
            if type(value) is not int or not 0 <= value <= LARGEST:
                self.size(f"device_traces[{device}][{i}]", entry, key)
        time_us = entry.get("time_us", 0)
        if type(time_us) is not int or not 0 <= time_us <= LARGEST:
            self.size(f"device_traces[{device}][{i}]", entry, "time_us")
        if type(entry.get("stream", 0)) is not int or type(entry.get("category", "")) is not str:
            self.optional(f"device_traces[{device}][{i}]", entry, {"stream": int, "category": str})
        if type(entry.get("user_metadata", "")) is not str:
            self.require(False, f"device_traces[{device}][{i}]['user_metadata']", "a string")
        stack: object = entry.get("frames")
        if id(stack) not in self.seen_stacks:
            self.frames(f"device_traces[{device}][{i}]", entry)
        if sum(map(_can_nest, map(type, entry.values()))) > _can_nest(type(stack)):
            self.rest(f"device_traces[{device}][{i}]", (v for k, v in entry.items() if k != "frames"))

    def frames(self, where: str, holder: dict[Any, Any]) -> None:
        if "frames" not in holder:
            return
        stack = holder["frames"]
        self.require(type(stack) in (list, tuple), f"{where}['frames']", "a list")
        self.seen_stacks.add(id(stack))
        if self.seen_frames.issuperset(map(id, stack)):
            return
        for frame in stack:
            right = (
                is_dict(frame)
                and type(frame.get("filename")) is str
                and type(frame.get("name")) is str
                and type(frame.get("line")) is int
                and not any(map(_can_nest, map(type, frame.values())))
            )
            self.require(right, f"{where}['frames']", "dicts of filename, line and name")
            self.keys(f"{where}['frames']", frame)
            self.seen_frames.add(id(frame))

    def rest(self, where: str, values: Iterable[Any]) -> None:
        # These values are not read here, but they are kept and perhaps written again, so the nesting must
        # end. A shared value counts each time.
        open_values = [(value, 1) for value in values]
        while open_values:
            value, depth = open_values.pop()
            inner = value.values() if is_dict(value) else value if is_list(value) else None
            if inner is None:
                continue
            self.require(depth <= MAX_DEPTH, where, f"nested less than {MAX_DEPTH} deep")
            self.count(1 + len(inner))
            if is_dict(value):
                self.keys(where, value)
            open_values.extend((item, depth + 1) for item in inner)
