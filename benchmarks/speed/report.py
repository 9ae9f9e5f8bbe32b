"""Whether a snapshot with a million events becomes a report within its bars: 20 s of CPU time, 25 MB.

The snapshot is generated: a training-like sequence with a call tree, phases, and memory of many sizes, so
that nothing compresses better than it would in a real one. Run: python -m benchmarks.speed.report
"""

import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.report import read_run, write_report
from harness.snapshot.build import TraceEvent, build_snapshot, write_snapshot
from harness.snapshot.trace import phase_metadata

BAR_S = 20.0
BAR_BYTES = 25_000_000
PHASES = ("data", "forward", "backward", "optimizer_step")
FIRST_ADDRESS = 0x7F00_0000_0000


def generated_snapshot(events: int, seed: int = 0) -> dict[str, Any]:
    """A snapshot whose trace has `events` entries, three for every allocation that is freed again."""
    chance = random.Random(seed)
    stacks = [_stack(chance) for _ in range(3000)]
    sizes = [512 * chance.randint(1, 2**17) for _ in range(2000)]
    trace: list[TraceEvent] = []
    live: list[tuple[int, int, Any]] = []
    address = FIRST_ADDRESS
    while len(trace) < events:
        phase = PHASES[(8 * len(trace) // events) % 4]
        metadata = phase_metadata(phase)
        grows = chance.random() < (0.6 if phase == "forward" else 0.4)
        if grows or not live:
            size, stack = chance.choice(sizes), chance.choice(stacks)
            trace.append(TraceEvent("alloc", address, size, metadata, stack, time_us=len(trace)))
            live.append((address, size, stack))
            address += size
        else:
            freed, size, stack = live.pop(chance.randrange(max(0, len(live) - 200), len(live)))
            for action in ("free_requested", "free_completed"):
                trace.append(TraceEvent(action, freed, size, metadata, stack, time_us=len(trace)))
    return build_snapshot(trace, [_segment(address, live)])


def _stack(chance: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "filename": f"/home/user/project/layer{chance.randrange(4**depth)}.py",
            "line": depth,
            "name": "forward",
        }
        for depth in range(12, 0, -1)
    ]


def _segment(end: int, live: Sequence[tuple[int, int, Any]]) -> dict[str, Any]:
    """One segment that holds everything: what is live, and free blocks between."""
    blocks: list[dict[str, Any]] = []
    position = FIRST_ADDRESS
    for address, size, stack in [*sorted(live, key=lambda block: block[0]), (end, 0, [])]:
        if address > position:
            blocks.append(
                {"address": position, "size": address - position, "state": "inactive", "frames": []}
            )
        if size:
            blocks.append({"address": address, "size": size, "state": "active_allocated", "frames": stack})
        position = address + size
    active = sum(size for _, size, _ in live)
    segment = {
        "device": 0,
        "address": FIRST_ADDRESS,
        "total_size": end - FIRST_ADDRESS,
        "is_expandable": False,
    }
    return segment | {"allocated_size": active, "active_size": active, "blocks": blocks}


def main() -> int:
    parser = parser_of("benchmarks.speed.report", __doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="keep the page here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        snapshot, page = Path(folder) / "snapshot.pickle", arguments.out or Path(folder) / "report.html"
        write_snapshot(snapshot, generated_snapshot(arguments.events))
        start, start_wall = time.process_time(), time.perf_counter()
        run = read_run(snapshot)
        read_s = time.process_time() - start
        write_report([run], page)
        total_s, size = time.process_time() - start, page.stat().st_size
        wall_s = time.perf_counter() - start_wall
    print(f"{arguments.events:,} entries, {run.history.events if run.history else 0:,} allocations and frees")
    print(
        f"CPU time: read {read_s:.1f} s, page {total_s - read_s:.1f} s, together {total_s:.1f} s; "
        f"wall {wall_s:.1f} s"
    )
    print(f"page {size / 1e6:.1f} MB; bars: {BAR_S:.0f} s, {BAR_BYTES / 1e6:.0f} MB")
    return int(total_s > BAR_S or size > BAR_BYTES)


if __name__ == "__main__":
    sys.exit(main())
