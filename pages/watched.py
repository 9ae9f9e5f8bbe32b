"""The table of watched programs in docs/watch.md, from profiles/cpu: `python -m pages.watched`."""

import json
import re
import sys
from typing import Any

from harness.report.table import markdown_table
from harness.system import profiles_folder
from pages.links import DOCS
from pages.parts import write_or_check

PAGE = DOCS / "watch.md"
PLACE = re.compile(r"(<!-- programs -->\n).*?(<!-- the end of programs -->)", re.DOTALL)
HEADINGS = (
    "program",
    "rank",
    "steps",
    "phases",
    "peak, bytes",
    "sum of categories",
    "unwatched peak",
    "differ by",
)


def rows(programs: dict[str, list[dict[str, Any]]]) -> list[tuple[str, ...]]:
    """A row for each process of each program."""
    found = []
    for name, processes in programs.items():
        for rank, row in enumerate(processes):
            peak, alone = row["sum_of_categories_bytes"], row["unwatched_peak_bytes"]
            found.append(
                (
                    name,
                    str(rank) if len(processes) > 1 else "-",
                    f"{row['steps']} of {row['steps_of_the_program']}",
                    ", ".join(row["phases"]),
                    *(f"{size:,}" for size in (row["peak_bytes"], peak, alone)),
                    f"{abs(peak - alone) / alone:.3%}",
                )
            )
    return found


def with_table(page: str) -> str:
    """The page with the table, and the cost, as the data has them."""
    folder = profiles_folder() / "cpu"
    programs = json.loads((folder / "watched.json").read_text())["programs"]
    cost = json.loads((folder / "watch_overhead.json").read_text())
    table = markdown_table(HEADINGS, rows(programs))
    said = (
        "A watched step outside the recorded ones, its phases timed and its line written, takes "
        f"{cost['ratio']:.3f} times an unwatched one (95 % {cost['ratio_low']:.3f} to "
        f"{cost['ratio_high']:.3f}, {cost['rounds']} pairs of {cost['bare_median_s'] * 1e3:.0f} ms, on a CPU"
        "): `python -m benchmarks.speed.watch`.\n"
    )
    return PLACE.sub(lambda found: f"{found[1]}{table}\n{said}{found[2]}", page)


def main(check: bool) -> None:
    """Write the page, or compare it."""
    write_or_check({PAGE: with_table(PAGE.read_text(encoding="utf-8"))}, "pages.watched", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
