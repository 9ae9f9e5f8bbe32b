"""A memory snapshot as JSON: data that cannot run, read by anything. This module imports no torch.

The document is {"format": "harness-snapshot", "version": 1, "stacks": [...], "snapshot": {...}}: the snapshot
as torch.cuda.memory._snapshot() gives it, but `frames` is an index into the stacks. Thousands of entries
share a stack; written out at each of them, a snapshot would be twenty times as large.
"""

import json
from collections.abc import Iterator
from typing import Any

from harness.errors import InputError
from harness.snapshot.shape import is_dict, is_list

FORMAT = "harness-snapshot"
VERSION = 1
_PAIRS = ("pool_id", "segment_pool_id")
"""The keys whose values torch gives as tuples; JSON has only lists."""


def snapshot_to_json(snapshot: dict[str, Any]) -> str:
    """A snapshot of checked shape (snapshot/shape.py) as one JSON document.

    Raises InputError when it holds what JSON cannot say: nan, infinity.
    """
    stacks: list[Any] = []
    index_of: dict[int, int] = {}

    def indexed(holder: dict[str, Any]) -> dict[str, Any]:
        frames = holder.get("frames")
        if frames is None:
            return holder
        if id(frames) not in index_of:  # the snapshot keeps every stack alive, so ids stay apart
            index_of[id(frames)] = len(stacks)
            stacks.append(frames)
        return {**holder, "frames": index_of[id(frames)]}

    segments = [
        {**indexed(segment), "blocks": [indexed(block) for block in segment["blocks"]]}
        for segment in snapshot["segments"]
    ]
    traces = [[indexed(entry) for entry in trace] for trace in snapshot["device_traces"]]
    whole = {**snapshot, "segments": segments, "device_traces": traces}
    document = {"format": FORMAT, "version": VERSION, "stacks": stacks, "snapshot": whole}
    try:
        return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the snapshot cannot be written as JSON: {error}. Record it again with harness or with "
            "torch.cuda.memory._dump_snapshot(), which write only what JSON can say."
        ) from None


def is_document(value: Any) -> bool:
    """Whether `value` is a parsed document of snapshot_to_json."""
    return is_dict(value) and value.get("format") == FORMAT


def snapshot_of_document(document: dict[str, Any], origin: str) -> Any:
    """The snapshot in a parsed document, its stacks in their places and shared again; shape not yet checked.

    Raises InputError naming `origin` for another version and for a stack that is not there.
    """
    version, stacks, snapshot = (document.get(key) for key in ("version", "stacks", "snapshot"))
    if version != VERSION or type(version) is not int:
        raise InputError(
            f"{origin} is of version {version!r:.40} of {FORMAT}; this version reads {VERSION}. "
            "Write it again with `harness snapshot to-json`."
        )
    if not is_list(stacks):
        raise InputError(f"{origin} has no list of stacks. Write it again with `harness snapshot to-json`.")
    for holder in _holders(snapshot):
        index = holder.get("frames")
        if type(index) is int:
            if not 0 <= index < len(stacks):
                raise InputError(
                    f"{origin} refers to stack {index} of {len(stacks)}. "
                    "It is damaged: write it again with `harness snapshot to-json`."
                )
            holder["frames"] = stacks[index]
        for key in _PAIRS:
            pair = holder.get(key)
            if is_list(pair) and len(pair) == 2 and all(type(number) is int for number in pair):
                holder[key] = tuple(pair)
    return snapshot


def _holders(snapshot: Any) -> Iterator[dict[str, Any]]:
    """Every segment, block and trace entry. What has another shape is left to snapshot/shape.py to refuse."""
    if not is_dict(snapshot):
        return
    segments = _dicts(snapshot.get("segments"))
    for segment in segments:
        yield segment
        yield from _dicts(segment.get("blocks"))
    traces = snapshot.get("device_traces")
    for trace in traces if is_list(traces) else []:
        yield from _dicts(trace)


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if is_dict(value)] if is_list(values) else []
