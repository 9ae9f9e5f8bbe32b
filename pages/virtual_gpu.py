"""The table of docs/virtual-gpu.md from profiles/cpu/virtual_gpu_recipes.json, which
`python -m benchmarks.virtual_gpu.recipes --out profiles/cpu/virtual_gpu_recipes.json` writes.

python -m pages.virtual_gpu            write it
python -m pages.virtual_gpu --check    fail if it is not so
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness.report.table import markdown_table
from harness.system.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiles" / "cpu" / "virtual_gpu_recipes.json"
PAGE = ROOT / "docs" / "virtual-gpu.md"
BEGIN, END = "<!-- recipes -->\n", "<!-- end of recipes -->\n"


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each recipe on each device, and the versions it is of."""
    columns = ("recipe", "device", "emulated, allocated", "simulated", "emulated, reserved", "simulated")
    rows = [(f"`{row['recipe']}`", row["gpu"], *_cells(row)) for row in found["rows"]]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    said = f"\nWith {versions}; `{' '.join(found['changed'])}`.\n"
    return markdown_table(columns, rows, range(2, 6)) + said


def _cells(row: dict[str, Any]) -> list[str]:
    if "impossible" in row:
        return [row["impossible"].replace("|", "\\|"), "", "", ""]
    emulated, simulated = row["emulated"], row["simulated"]
    cells = []
    for name in ("allocated_bytes", "reserved_bytes"):
        cells.append(f"{emulated[name] / 2**30:.2f} GiB" if emulated["fits"] else "out of memory")
        apart = simulated[name] - emulated[name]
        alike = "the same" if apart == 0 else f"{apart:+,} bytes"
        cells.append(alike if simulated["fits"] else "out of memory")
    return cells


def main(check: bool) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_bytes()))}\n{END}{after}"
    if not check:
        write_whole(PAGE, written)
    elif text != written:
        sys.exit(f"docs/{PAGE.name} is not of {RESULTS.name}. Run: python -m pages.virtual_gpu")


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
