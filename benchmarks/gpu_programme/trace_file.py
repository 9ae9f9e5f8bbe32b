"""An allocation trace as a small file: a recorded memory history without what nobody compares.

Kept: every action of the allocator from the process's first to its last, with address, size, stream, phase,
category and a short stack; the segments at the end; torch's own statistics at the end of every phase.
The file is gzipped JSON: columns of numbers, and tables that they point into.
"""

import gzip
import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.recipe.check import check_recipe
from harness.recipe.recipe import Recipe

FORMAT = "harness-trace"
VERSION = 1
MAX_FILE_BYTES = 2**26
MAX_TEXT_BYTES = 2**30
MAX_FRAMES = 12
COLUMNS = ("action", "address", "size", "stream", "metadata", "category", "stack")
_PLUMBING = (
    "torch/nn/modules/module.py",
    "torch/_compile.py",
    "torch/_dynamo/eval_frame.py",
    "contextlib.py",
)
_PACKAGES_FOLDER = r"(?:site-packages|dist-packages|python3\.\d+)/"
_INSTALL_FOLDER = re.compile(rf"^.*/(?:{_PACKAGES_FOLDER}|(?=(?:harness|benchmarks|tests)/))")


@dataclass(frozen=True)
class Trace:
    """A recorded run. Bytes and addresses are ints as torch gave them."""

    name: str
    recipe_fields: dict[str, Any]
    """Of the recipe; `model` is a label when the model was cut for this run."""
    model_config: dict[str, Any] | None
    """The config of such a model."""
    device: dict[str, Any]
    """name, memory_bytes, ..."""
    provenance: dict[str, Any]
    allocator_settings: dict[str, Any]
    """torch.cuda.memory._snapshot()["allocator_settings"]."""
    entries: list[dict[str, Any]]
    """As torch.cuda.memory._snapshot()["device_traces"][device]: action, addr, size, stream, user_metadata,
    category, frames. An "oom" has device_free and the same as addr."""
    segments: list[dict[str, Any]]
    """As torch.cuda.memory._snapshot()["segments"], without frames."""
    phases: list[dict[str, Any]]
    """step (-1: setup), phase, and memory_stats at its end, with peaks since it began."""
    losses: list[float | None]
    oom: str | None
    """torch's message, if the run ended so."""

    def recipe(self, folder: Path) -> Recipe:
        """The recipe as it ran; a cut model's config is written to `folder`."""
        fields = dict(self.recipe_fields)
        if self.model_config is not None:
            path = folder / f"{fields['model']}.json"
            path.write_text(json.dumps(self.model_config))
            fields["model"] = str(path)
        return check_recipe(fields, self.name)

    def snapshot(self) -> dict[str, Any]:
        """The trace as the snapshot it was."""
        return {
            "segments": self.segments,
            "device_traces": [self.entries],
            "allocator_settings": self.allocator_settings,
            "external_annotations": [],
        }


def encode_trace(trace: Trace) -> bytes:
    """The file's bytes; the same trace always gives the same bytes."""
    tables = {name: _Table() for name in ("action", "address", "metadata", "category", "stack", "frame")}
    columns: dict[str, list[int]] = {name: [] for name in COLUMNS}
    for entry in trace.entries:
        address = entry["device_free"] if entry["action"] == "oom" else entry["addr"]
        frames = tuple(tables["frame"].number(frame) for frame in _short_stack(entry.get("frames", ())))
        columns["action"].append(tables["action"].number(entry["action"]))
        columns["address"].append(tables["address"].number(address))
        columns["size"].append(entry["size"])
        columns["stream"].append(entry["stream"])
        columns["metadata"].append(tables["metadata"].number(entry.get("user_metadata", "")))
        columns["category"].append(tables["category"].number(entry.get("category")))
        columns["stack"].append(tables["stack"].number(frames))
    document = {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(trace, name) for name in _PLAIN_FIELDS},
        "segments": [_short_segment(segment) for segment in trace.segments],
        "columns": columns,
        "tables": {name: list(table.numbers) for name, table in tables.items()},
    }
    return gzip.compress(json.dumps(document, separators=(",", ":"), allow_nan=False).encode(), mtime=0)


def decode_trace(data: bytes, origin: str = "the trace") -> Trace:
    """The trace in `data`. Raises InputError naming `origin` if it is none, or damaged."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            text = file.read(MAX_TEXT_BYTES)
        document = json.loads(text)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise InputError(f"{origin} is not a gzipped JSON file ({error}). Record it again.") from None
    found = (document.get("format"), document.get("version")) if isinstance(document, dict) else None
    if found != (FORMAT, VERSION):
        raise InputError(f"{origin} is not a {FORMAT} of version {VERSION}: it says {found}.")
    try:
        return Trace(
            **{name: document[name] for name in _PLAIN_FIELDS},
            segments=[_whole_segment(segment) for segment in document["segments"]],
            entries=_entries(document["columns"], document["tables"]),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{origin} is damaged: {type(error).__name__}: {error}.") from None


def load_trace(path: Path) -> Trace:
    """Read a trace file. Raises InputError if it is missing, too large or not one."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InputError(f"{path} has {size} bytes, more than a trace: {MAX_FILE_BYTES}.")
        return decode_trace(path.read_bytes(), str(path))
    except OSError as error:
        raise InputError(f"cannot read the trace {path}: {error.strerror}.") from None


@lru_cache(maxsize=4096)
def trimmed_path(filename: str) -> str:
    """A source file's path from its package on: what means the same on another machine."""
    return _INSTALL_FOLDER.sub("", filename)


_PLAIN_FIELDS = (
    "name",
    "recipe_fields",
    "model_config",
    "device",
    "provenance",
    "allocator_settings",
    "phases",
    "losses",
    "oom",
)


class _Table:
    """Numbers for distinct values, in order of first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def _short_stack(frames: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    """The innermost frames that say where: (file, line, function)."""
    named = ((trimmed_path(f["filename"]), f["line"], f["name"]) for f in frames)
    return [frame for frame in named if not frame[0].endswith(_PLUMBING)][:MAX_FRAMES]


def _entries(columns: Mapping[str, list[int]], tables: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    frames = [{"filename": file, "line": line, "name": name} for file, line, name in tables["frame"]]
    # one list for each stack, as torch has it: a hundred thousand entries share a thousand
    stacks = [[frames[number] for number in stack] for stack in tables["stack"]]
    entries = []
    for row in zip(*(columns[name] for name in COLUMNS), strict=True):
        action, address, size, stream, metadata, category, stack = row
        entry = {
            "action": tables["action"][action],
            "addr": tables["address"][address],
            "size": size,
            "stream": stream,
            "user_metadata": tables["metadata"][metadata],
            "frames": stacks[stack],
        }
        if entry["action"] == "oom":
            entry["device_free"] = entry["addr"]
        if tables["category"][category] is not None:
            entry["category"] = tables["category"][category]
        entries.append(entry)
    return entries


_SEGMENT_FIELDS = (
    "address",
    "total_size",
    "allocated_size",
    "active_size",
    "requested_size",
    "stream",
    "segment_type",
    "is_expandable",
)


def _short_segment(segment: Mapping[str, Any]) -> list[Any]:
    blocks = [[block["size"], block["requested_size"], block["state"]] for block in segment["blocks"]]
    return [*(segment[name] for name in _SEGMENT_FIELDS), blocks]


def _whole_segment(row: list[Any]) -> dict[str, Any]:
    *values, blocks = row
    segment = dict(zip(_SEGMENT_FIELDS, values, strict=True))
    address = segment["address"]
    whole = []
    for size, requested_size, state in blocks:
        whole.append(
            {"address": address, "size": size, "requested_size": requested_size, "state": state, "frames": []}
        )
        address += size
    return {"device": 0, "segment_pool_id": (0, 0), **segment, "frames": [], "blocks": whole}
