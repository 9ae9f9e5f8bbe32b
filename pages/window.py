"""The table of releases in docs/contributing.md from profiles/cpu/window.json: `python -m pages.window`."""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.window import RELEASES, RESULTS, ROOT
from harness.report.table import markdown_table
from pages.parts import with_parts, write_or_check

PAGE = ROOT / "docs" / "contributing.md"
KINDS = ("passed", "failed", "error", "skipped")


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
    written = with_parts(PAGE, {"window": table(json.loads(RESULTS.read_bytes()))})
    write_or_check({PAGE: written}, "pages.window", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
