"""The tables of docs/virtual-gpu.md and docs/several-gpus.md that hold the virtual GPU and the simulation
side by side, from what these commands write:

    python -m benchmarks.virtual_gpu.recipes --out profiles/cpu/virtual_gpu_recipes.json
    python -m benchmarks.virtual_gpu.ranks --out docs/data/ranks.json

python -m pages.virtual_gpu            write them
python -m pages.virtual_gpu --check    fail if they are not so
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.report.table import markdown_table
from harness.system.files import write_whole

ROOT = Path(__file__).resolve().parents[1]


def recipes(found: dict[str, Any]) -> str:
    """A row for each recipe on each device, and the versions it is of."""
    head = ("recipe", "device", "emulated, allocated", "simulated", "emulated, reserved", "simulated")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    rows = [[f"`{row['recipe']}`", row["gpu"], *_both(row)] for row in found["rows"]]
    said = f"\nWith {versions}; `{' '.join(found['changed'])}`.\n"
    return markdown_table(head, rows, range(2, len(head))) + said


def ranks(found: dict[str, Any]) -> str:
    """A row for each way to divide a step."""
    head = (
        "rank 0 of 8",
        "emulated, allocated",
        "simulated",
        "napkin",
        "emulated, reserved",
        "simulated",
        "same requests",
    )
    rows = []
    for row in found["rows"]:
        if "impossible" in row:
            rows.append([f"`{row['cell']}`", row["impossible"].replace("|", "\\|"), "", "", "", "", ""])
            continue
        allocated, reserved = row["allocated"], row["reserved"]
        cells = [_gib(allocated["emulated"]), _apart(allocated["simulated"] - allocated["emulated"])]
        napkin = allocated.get("napkin")
        cells += ["" if napkin is None else f"{napkin / allocated['emulated'] - 1:+.1%}"]
        cells += [_gib(reserved["emulated"]), _apart(reserved["simulated"] - reserved["emulated"])]
        rows.append([f"`{row['cell']}`", *cells, "yes" if row["same_requests"] else "no"])
    said = f"\nWith torch {found['torch']}, on {found['gpu']}.\n"
    return markdown_table(head, rows, range(1, len(head))) + said


def _both(row: dict[str, Any]) -> list[str]:
    if "impossible" in row:
        return [row["impossible"].replace("|", "\\|"), "", "", ""]
    emulated, simulated = row["emulated"], row["simulated"]
    cells = []
    for name in ("allocated_bytes", "reserved_bytes"):
        cells.append(_gib(emulated[name]) if emulated["fits"] else "out of memory")
        if emulated["fits"] and simulated["fits"]:
            cells.append(_apart(simulated[name] - emulated[name]))
        else:
            cells.append("fits" if simulated["fits"] else "out of memory")
    return cells


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"


def _apart(size_bytes: int) -> str:
    return "the same" if size_bytes == 0 else f"{size_bytes:+,} bytes"


TABLES: tuple[tuple[str, str, str, Callable[[dict[str, Any]], str]], ...] = (
    ("docs/virtual-gpu.md", "recipes", "profiles/cpu/virtual_gpu_recipes.json", recipes),
    ("docs/several-gpus.md", "ranks", "docs/data/ranks.json", ranks),
)
"""Page, name of the table (its place is between two comments of that name), results, what makes of them a
table."""


def main(check: bool) -> None:
    for page, name, results, table in TABLES:
        text = (ROOT / page).read_text(encoding="utf-8")
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        written = f"{before}{begin}\n{table(json.loads((ROOT / results).read_bytes()))}\n{end}{after}"
        if not check:
            write_whole(ROOT / page, written)
        elif text != written:
            sys.exit(f"{page} is not of {results}. Run: python -m pages.virtual_gpu")


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
