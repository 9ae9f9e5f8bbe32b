"""The tables of docs/several-gpus.md: the virtual GPU, the simulation and napkin side by side, and what the
simulation of a rank costs. They are of

    docs/data/ranks.json            python -m benchmarks.virtual_gpu.ranks --out FILE
    profiles/ranks_speed.json       python -m benchmarks.speed.ranks --out FILE

python -m pages.several_gpus            write them
python -m pages.several_gpus --check    fail if they are not so
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness.report.table import markdown_table
from harness.system import write_whole

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "several-gpus.md"
HEAD = (
    "rank 0 of 8",
    "emulated, allocated",
    "simulated",
    "napkin",
    "emulated, reserved",
    "simulated",
    "same requests",
)


def ranks(found: dict[str, Any]) -> str:
    """A row for each way to divide a step."""
    said = f"\nWith torch {found['torch']}, on {found['gpu']}.\n"
    return markdown_table(HEAD, [_row(row) for row in found["rows"]], range(1, len(HEAD))) + said


def _row(row: dict[str, Any]) -> list[str]:
    name = f"`{row['cell']}`"
    if "impossible" in row:
        return [name, row["impossible"].replace("|", "\\|"), *[""] * (len(HEAD) - 2)]
    allocated, reserved = row["allocated"], row["reserved"]
    napkin = allocated.get("napkin")
    return [
        name,
        _gib(allocated["emulated"]),
        _apart(allocated["simulated"] - allocated["emulated"]),
        "" if napkin is None else f"{napkin / allocated['emulated'] - 1:+.1%}",
        _gib(reserved["emulated"]),
        _apart(reserved["simulated"] - reserved["emulated"]),
        "yes" if row["same_requests"] else "no",
    ]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _apart(size_bytes: int) -> str:
    return "the same" if size_bytes == 0 else f"{size_bytes:+,} bytes"


def speed(found: dict[str, Any]) -> str:
    """A row for each simulated rank."""
    head = ("simulated", "seconds", "of a processor", "memory of the host")
    rows = [
        [
            "rank 0 of {1}, {0} model".format(*row["case"].split(" on ")),
            f"{row['wall_s']:.1f}",
            f"{row['cpu_s']:.1f}",
            _gib(row["resident_bytes"]),
        ]
        for row in found["rows"]
    ]
    return markdown_table(head, rows, range(1, len(head)))


PARTS = {"ranks": ("docs/data/ranks.json", ranks), "speed": ("profiles/ranks_speed.json", speed)}
"""Of the page, between comments of their names: the results that each is of, and what writes it."""


def main(check: bool) -> None:
    text = written = PAGE.read_text(encoding="utf-8")
    for name, (results, write) in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = written.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            sys.exit(f"docs/{PAGE.name} has no part {begin.strip()} … {end.strip()}")
        written = f"{before}{begin}\n{write(json.loads((ROOT / results).read_bytes()))}\n{end}{after}"
    if not check:
        write_whole(PAGE, written)
    elif text != written:
        sys.exit(f"docs/{PAGE.name} is not of its results. Run: python -m pages.several_gpus")


if __name__ == "__main__":
    main(sys.argv[1:] == ["--check"])
