"""The table of releases in docs/contributing.md from profiles/cpu/window.json: `python -m pages.window`."""

import json
import sys
from collections import Counter
from typing import Any

from benchmarks.window import KINDS, RESULTS, ROOT
from harness.report.table import markdown_table
from pages.parts import with_parts, write_or_check

PAGE = ROOT / "docs" / "contributing.md"
SHOWN = ("torch", "transformers", "peft", "bitsandbytes")


def table(found: dict[str, Any]) -> str:
    """Markdown: a row for each environment, files with failed tests, why tests were skipped."""
    rows, failed, skipped = [], [], []
    for end, entry in found.items():
        releases = ", ".join(f"{name} {entry['releases'][name]}" for name in SHOWN)
        files = entry["files"]
        sums = [str(sum(of[kind] for of in files.values())) for kind in KINDS]
        run = f"{len(files)} of {entry['test_files']}"
        rows.append((end, releases, entry["date"], run, *sums))
        by_file = Counter(test.partition("::")[0] for test in entry["not_passed"])
        failed += [f"- {end}: {count} in `{file}`" for file, count in by_file.items()]
        reasons = Counter((test.partition("::")[0], why) for test, why in entry["skipped"].items())
        skipped += [f"- {end}: {count} in `{file}`: {why}" for (file, why), count in reasons.items()]
    columns = ("end", "releases", "last run", "test files", "passed", "failed", "errors", "skipped")
    lists = {"Not all passed:": failed, "Skipped, and why:": skipped}
    said = [f"\n{title}\n\n{chr(10).join(lines)}\n" for title, lines in lists.items() if lines]
    return markdown_table(columns, rows, range(4, 8)) + "".join(said)


def main(check: bool) -> None:
    """Write the table, or compare it."""
    written = with_parts(PAGE, {"window": table(json.loads(RESULTS.read_bytes()))})
    write_or_check({PAGE: written}, "pages.window", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
