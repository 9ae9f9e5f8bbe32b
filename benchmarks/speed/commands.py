"""Times commands of harness as whole processes, start-up included: wall time, CPU time, resident memory."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.system.files import write_whole
from harness.system.versions import provenance

GIB = 2**30
BAR_BYTES = 2 * GIB
Cases = Mapping[str, tuple[tuple[str, ...], float]]
"""By name: the arguments of harness, and the seconds they may take."""


@dataclass(frozen=True)
class Run:
    """One process, from its start to its end."""

    wall_s: float
    cpu_s: float
    """Of all its threads: more than wall_s where the machine had two cores to give, less where it waited."""
    resident_bytes: int
    """At its largest."""


def run(arguments: tuple[str, ...]) -> Run:
    """Run `harness` with these arguments, its output thrown away. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "harness", *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):  # 3: simulated, and it does not fit the device
        raise subprocess.CalledProcessError(process.returncode, command)
    unit = 1 if sys.platform == "darwin" else 1024
    return Run(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit)


def measure(cases: Cases, runs: int, bar_bytes: int = BAR_BYTES) -> list[dict[str, Any]]:
    """Every case `runs` times: medians, and whether they are within the bars."""
    rows = []
    for name, (arguments, bar_s) in cases.items():
        done = [run(arguments) for _ in range(runs)]
        wall_s, resident_bytes = median(r.wall_s for r in done), max(r.resident_bytes for r in done)
        rows.append(
            {
                "case": name,
                "command": f"harness {' '.join(arguments)}",
                "wall_s": wall_s,
                "cpu_s": median(r.cpu_s for r in done),
                "bar_s": bar_s,
                "resident_bytes": resident_bytes,
                "within_bars": wall_s <= bar_s and resident_bytes <= bar_bytes,
                "runs": [asdict(r) for r in done],
            }
        )
    return rows


def main(description: str, cases: Cases, bar_bytes: int = BAR_BYTES) -> None:
    """Print a row for each case, and write everything as JSON where --out says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = measure(cases, given.runs, bar_bytes)
    print(f"{'':22} {'wall':>8} {'bar':>6} {'CPU time':>9} {'resident':>9}   load {os.getloadavg()[0]:.1f}")
    for row in rows:
        verdict = "" if row["within_bars"] else "  over the bar"
        print(
            f"{row['case']:22} {row['wall_s']:7.2f}s {row['bar_s']:5.1f}s {row['cpu_s']:8.2f}s "
            f"{row['resident_bytes'] / GIB:6.2f} GiB{verdict}"
        )
    if given.out is not None:
        document = {"provenance": provenance(), "load": os.getloadavg(), "rows": rows}
        write_whole(given.out, json.dumps(document, indent=1) + "\n")
