"""Whether the virtual GPU still makes the recorded traces: every action of the allocator, byte for byte.

    harness emulate --gpu h200 -- python -m benchmarks.gpu_programme --part traces --out DIR
    python -m benchmarks.virtual_gpu.recordings DIR/traces.json

Random recipes (random_recipes.py) are files of their own: give those.
"""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.gpu_programme.trace_file import Trace, decode_trace, load_trace
from harness.hardware import TABLE_NAMES

RECORDED = Path(__file__).resolve().parents[2] / "tests" / "recordings" / "virtual_gpu"


def first_difference(ours: Trace, recorded: Trace) -> str | None:
    """Where two traces part, in words: an action of the allocator, or torch's statistics of a phase."""

    def actions(trace: Trace) -> list[tuple]:
        """In order, but for what autocast frees together: that is ordered by a hash of addresses on the
        host."""
        found: list[tuple] = []
        freed: list[tuple] = []
        for entry in trace.entries:
            action = entry["action"], entry["addr"], entry["size"], entry["stream"]
            if _by_autocast(entry):
                freed.append(action)
                continue
            found += [*sorted(freed), action]
            freed = []
        return found + sorted(freed)

    mine, theirs = actions(ours), actions(recorded)
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one != other:
            return f"action {number} of {len(theirs)} is {one}, recorded {other}"
    if len(mine) != len(theirs):
        return f"{len(mine)} actions, recorded {len(theirs)}"
    in_any_order = any(_by_autocast(entry) for entry in recorded.entries)
    for one, other in zip(ours.phases, recorded.phases, strict=True):
        names = {*one, *other}
        if in_any_order:  # free pieces of segments depend on which neighbour is freed first
            names -= {
                f"inactive_split_bytes.all.{what}" for what in ("current", "peak", "allocated", "freed")
            }
        if any(one.get(name) != other.get(name) for name in names):
            return f"the statistics of {one['phase']} in step {one['step']} differ"
    return None


def _by_autocast(entry: dict[str, Any]) -> bool:
    """Whether an entry of the history is a free by autocast, of the casts that it kept."""
    freed = entry["action"].startswith("free")
    return freed and any(frame["filename"].endswith("autocast_mode.py") for frame in entry["frames"])


def traces_in(path: Path) -> Iterator[Trace]:
    """The traces of a part "traces" of the hardware programme, or of one file of random_recipes."""
    if path.suffix == ".gz":
        yield load_trace(path)
        return
    for result in json.loads(path.read_bytes())["results"]:
        if "trace" in (result.get("result") or {}):
            yield decode_trace(base64.b64decode(result["result"]["trace"]), result["name"])


def main() -> int:
    """Exit status: 1 if a trace differs from its recording, or none has one."""
    parser = parser_of("benchmarks.virtual_gpu.recordings", __doc__)
    parser.add_argument("file", nargs="+", type=Path)
    compared, same = 0, 0
    for path in parser.parse_args().file:
        for trace in traces_in(path):
            recording = RECORDED / TABLE_NAMES[trace.device["name"]] / f"{trace.name}.json.gz"
            if not recording.exists():
                continue
            difference = first_difference(trace, load_trace(recording))
            print(f"{trace.name}: {difference or f'the same {len(trace.entries)} actions'}")
            compared, same = compared + 1, same + (difference is None)
    print(f"{same} of {compared} are the same")
    return int(not compared or same < compared)


if __name__ == "__main__":
    sys.exit(main())
