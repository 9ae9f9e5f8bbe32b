"""The table of releases in docs/contributing.md from profiles/cpu/window.json: `python -m pages.window`."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.window import RELEASES, RESULTS, ROOT
from harness.report.table import markdown_table
from harness.system import write_whole

PAGE = ROOT / "docs" / "contributing.md"
KINDS = ("passed", "failed", "error", "skipped")
BEGIN, END = "<!-- window -->\n", "<!-- end of window -->\n"


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each environment, and every file with a test that failed."""
    rows, failed = [], []
    for name, entry in found.items():
        releases = " ".join(f"{of} {entry['releases'][of]}," for of in RELEASES).removesuffix(",")
        files = entry["files"]
        sums = [str(sum(of[kind] for of in files.values())) for kind in KINDS]
        rows.append((name, releases, entry["date"], str(len(files)), *sums))
        failed += [f"- {name}: `{file}`" for file, of in files.items() if of["failed"] + of["error"]]
    columns = ("end", "releases", "last run", "test files", "passed", "failed", "errors", "skipped")
    said = f"\nNot all passed in:\n\n{chr(10).join(failed)}\n" if failed else ""
    return markdown_table(columns, rows, range(3, 8)) + said


def main(check: bool) -> None:
    """Write the table, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n{table(json.loads(RESULTS.read_bytes()))}\n{END}{after}"
    if not check:
        write_whole(PAGE, written)
    elif text != written:
        sys.exit(f"docs/{PAGE.name} is not of {RESULTS.name}. Run: python -m pages.window")


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
