"""The table of docs/several-gpus.md that holds the virtual GPU, the simulation and napkin side by side, from
docs/data/ranks.json (python -m benchmarks.virtual_gpu.ranks --out FILE).

python -m pages.several_gpus            write it
python -m pages.several_gpus --check    fail if it is not so
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
RESULTS = ROOT / "docs" / "data" / "ranks.json"
BEGIN, END = "<!-- ranks -->\n", "<!-- end of ranks -->\n"
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


def main(check: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        sys.exit(f"docs/{PAGE.name} has no part {BEGIN.strip()} … {END.strip()}")
    written = f"{before}{BEGIN}\n{ranks(json.loads(RESULTS.read_bytes()))}\n{END}{after}"
    if not check:
        write_whole(PAGE, written)
    elif text != written:
        sys.exit("docs/several-gpus.md is not of docs/data/ranks.json. Run: python -m pages.several_gpus")


if __name__ == "__main__":
    main(sys.argv[1:] == ["--check"])
