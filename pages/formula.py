"""docs/formula.md from what `python -m benchmarks.formula` and `python -m benchmarks.few_layers` write.

python -m pages.formula            # writes the page; with --check, compares it
"""

import json
import sys
from typing import Any

from benchmarks import few_layers
from benchmarks.formula import OUT
from harness.report.table import markdown_table
from pages.parts import ROOT, with_parts, write_or_check

PAGE = ROOT / "docs" / "formula.md"
FIRST = "llama-3.1-8b-lora"


def checks(rows: list[dict[str, Any]]) -> str:
    """Markdown: what comparing gave."""
    columns = (
        "recipe",
        "sizes compared",
        "allocated, bytes apart",
        "reserved, bytes apart",
        "times as fast as a simulation",
    )
    cells = [
        (
            row["recipe"],
            f"{row['sizes_compared']}",
            f"{row['largest_difference_bytes']['allocated']}",
            f"{row['largest_difference_bytes']['reserved']}",
            f"{row['simulation_over_formula_time']:.0f}",
        )
        for row in rows
    ]
    return markdown_table(columns, cells, range(1, 5))


def printed(rows: list[dict[str, Any]]) -> str:
    """Markdown: the formulas as the command prints them."""
    first = [row for row in rows if row["recipe"] == FIRST]
    others = [row for row in rows if row["recipe"] != FIRST]
    return "\n".join("```\n" + "\n".join(row["text"]) + "\n```\n" for row in [*first, *others])


def repeated(models: list[dict[str, Any]]) -> str:
    """Markdown: what few layers say of all of them."""
    columns = ("model", "requests", "the same from few layers", "whole ÷ first size", "whole ÷ another size")
    cells = [
        (
            row["model"],
            f"{row['requests']:,}",
            "yes" if row["equal"] else "no",
            f"{row['whole_over_first_time']:.1f}",
            f"{row['whole_over_another_time']:.1f}",
        )
        for row in models
        if row["equal"] is not None
    ]
    whole = ", ".join(row["model"] for row in models if row["equal"] is None)
    return f"{markdown_table(columns, cells, (1, 3, 4))}\nAlways simulated whole: {whole}.\n"


def main(check: bool) -> None:
    """Write the page, or compare it."""
    rows = json.loads((ROOT / OUT).read_text(encoding="utf-8"))["recipes"]
    models = json.loads((ROOT / few_layers.OUT).read_text(encoding="utf-8"))["models"]
    parts = {"formula": printed(rows), "formula checks": checks(rows), "few layers": repeated(models)}
    write_or_check({PAGE: with_parts(PAGE, parts)}, "pages.formula", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
