"""The tables of docs/several-gpus.md: the virtual GPU, the simulation and napkin side by side, and what the
simulation of a rank costs, and what others measured of the links. They are of

    docs/data/ranks.json            python -m benchmarks.virtual_gpu.ranks --out FILE
    profiles/ranks_speed.json       python -m benchmarks.speed.ranks --out FILE
    profiles/published/links.json   python -m benchmarks.published.links

python -m pages.several_gpus            write them
python -m pages.several_gpus --check    fail if they are not so
"""

import json
import sys
from typing import Any

from harness.report.table import markdown_table
from harness.units import in_gib
from pages.parts import ROOT, with_parts, write_or_check

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
        in_gib(allocated["emulated"]),
        _apart(allocated["simulated"] - allocated["emulated"]),
        "" if napkin is None else f"{napkin / allocated['emulated'] - 1:+.1%}",
        in_gib(reserved["emulated"]),
        _apart(reserved["simulated"] - reserved["emulated"]),
        "yes" if row["same_requests"] else "no",
    ]


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
            in_gib(row["resident_bytes"]),
        ]
        for row in found["rows"]
    ]
    return markdown_table(head, rows, range(1, len(head)))


def links(found: dict[str, Any]) -> str:
    """A row for each collective that was measured."""
    head = ("collective", "bytes", "measured, GB/s", "model, GB/s", "seconds off", "why")
    rows = [
        [
            f"{row['kind'].replace('_', '-')}, {row['ranks']} × {row['gpu']}",
            "large" if row["size_bytes"] is None else in_gib(row["size_bytes"]),
            f"{row['bus_gb_per_s']:.0f}",
            f"{row['model_bus_gb_per_s']:.0f}",
            f"{row['seconds_off']:+.0%}",
            row["reason"],
        ]
        for row in found["rows"]
    ]
    return markdown_table(head, rows, range(1, 5))


PARTS = {
    "ranks": ("docs/data/ranks.json", ranks),
    "speed": ("profiles/ranks_speed.json", speed),
    "links": ("profiles/published/links.json", links),
}
"""Of the page, between comments of their names: the results that each is of, and what writes it."""


def main(check: bool) -> None:
    parts = {
        name: write(json.loads((ROOT / results).read_bytes())) for name, (results, write) in PARTS.items()
    }
    write_or_check({PAGE: with_parts(PAGE, parts)}, "pages.several_gpus", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
