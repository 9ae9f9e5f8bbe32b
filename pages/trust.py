"""docs/trust.md from docs/trust.json, which `make trust` writes: every fault tried, and what happened.

python -m pages.trust            write it
python -m pages.trust --check    fail if it is not so
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness.report.table import markdown_table
from pages.parts import write_or_check

FOLDER = Path(__file__).resolve().parents[1] / "docs"
RESULTS = FOLDER / "trust.json"
PAGE = FOLDER / "trust.md"
INTRODUCTION = """\
# What was tried, and what happened

A harness that dies loses an expensive GPU hour, and a file from somebody else should cost no more than the
time to read a message. Each row is a fault that a test really makes: the process is killed, the disk is full,
the file is hostile. `make trust` runs them all and writes this page from what came out; `make test-long` runs
the same with fewer tries. What is trusted and what is not is in `SECURITY.md`.

- **exit 2** is one sentence about what is wrong, where, and what to do; never a traceback.
- A file is written beside its place, reaches the disk, and then takes its name: a reader sees the old one or
  the new one. Only SIGKILL or a power cut leaves a `.partial` file behind, which nothing reads.
- SIGTERM (143) and a closed terminal (129) end a command as Ctrl-C (130) does: what is known is written.

What the tests themselves would not notice is on [a page of its own](mutation.md).
"""

COLUMNS = ("fault", "tried", "what happened", "test")


def page(rows: list[dict[str, Any]]) -> str:
    """The Markdown of the whole page: a table for each area, in the order of their first test."""
    parts = [INTRODUCTION]
    for area in dict.fromkeys(row["area"] for row in rows):
        table = [
            (_cell(row["fault"]), f"{row['times']:,}", _cell(row["outcome"]), f"`{row['test']}`")
            for row in rows
            if row["area"] == area
        ]
        parts.append(f"\n## {area}\n\n{markdown_table(COLUMNS, table, {1})}")
    total = sum(row["times"] for row in rows)
    parts.append(f"\n{total:,} tries in all.\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    written = {PAGE: page(json.loads(RESULTS.read_bytes()))}
    write_or_check(written, "pages.trust", check="--check" in sys.argv[1:])
