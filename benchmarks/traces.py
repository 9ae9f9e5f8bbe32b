"""The recorded traces, held against the allocator model, or unpacked for other instruments.

    python -m benchmarks.traces replay [TRACE ...]      does the model make the same segments, to the byte?
    python -m benchmarks.traces unpack DIR [TRACE ...]  <name>.pickle for the memory_viz page and for
                                                        `harness simulate --trace-diff`, <name>.yaml beside it

Without TRACE: all of tests/data/traces.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_trace_file import Trace, load_trace
from harness.allocator_replay import Replay, replay
from harness.allocator_settings import Settings, settings_from_environment
from harness.allocator_snapshot import snapshot_segments
from harness.errors import InputError
from harness.files import write_whole
from harness.recipe_file import recipe_yaml
from harness.snapshot import write_snapshot

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"


def replayed(trace: Trace) -> Replay:
    """The trace's requests, made to the allocator model with the recorded settings."""
    return replay(trace.entries, settings_of(trace), trace.device["memory_bytes"])


def settings_of(trace: Trace) -> Settings:
    """The allocator settings and the order of free blocks of the recorded process."""
    environment = trace.provenance.get("settings") or {}
    return settings_from_environment(environment, trace.provenance["versions"]["torch"])


def same_segments(trace: Trace, made: Replay) -> bool:
    """Whether the model ends with the recorded segments: addresses, sizes, and every block in them."""
    ours = [_shape(segment) for segment in snapshot_segments(made.allocator)]
    return ours == sorted(_shape(segment) for segment in trace.segments)


def unpack(trace: Trace, folder: Path) -> Path:
    """Write <name>.pickle and <name>.yaml (and the config of a cut model) to `folder`; the first's path."""
    path = folder / f"{trace.name}.pickle"
    write_snapshot(path, trace.snapshot())
    write_whole(folder / f"{trace.name}.yaml", recipe_yaml(trace.recipe(folder)))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0; 1 if a replay diverges; 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("replay").add_argument("trace", nargs="*", type=Path)
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("folder", type=Path)
    unpacking.add_argument("trace", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    try:
        paths = options.trace or sorted(TRACES.glob("*.json.gz"))
        if not paths:
            raise InputError(f"{TRACES} holds no trace. Record some: python -m benchmarks.gpu --part traces.")
        if options.command == "unpack":
            options.folder.mkdir(parents=True, exist_ok=True)
            for path in paths:
                print(unpack(load_trace(path), options.folder))
            return 0
        return int(not all([_report(load_trace(path)) for path in paths]))
    except InputError as error:
        print(f"benchmarks.traces: {error}", file=sys.stderr)
        return error.exit_status


def _report(trace: Trace) -> bool:
    made = replayed(trace)
    if made.divergence is not None:
        where = f"entry {made.divergence.index} of {len(trace.entries)}"
        print(f"{trace.name}: {where}: {made.divergence.problem}")
        print("".join(f"    {event}\n" for event in made.divergence.before), end="")
        return False
    same = same_segments(trace, made)
    blocks = "and blocks" if same else "but not the same blocks"
    print(f"{trace.name}: {made.requests} requests, the same segments {blocks}")
    return same


def _shape(segment: dict) -> tuple:
    blocks = tuple((block["size"], block["state"].startswith("active")) for block in segment["blocks"])
    return segment["address"], segment["total_size"], segment["stream"], segment["segment_type"], blocks


if __name__ == "__main__":
    sys.exit(main())
