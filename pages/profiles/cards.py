"""The table of docs/cards.md, from what `python -m benchmarks.cards` writes: profiles/cards.json.

python -m pages.profiles.cards            # writes it; with --check, compares it
"""

import json
import sys
from typing import Any

from benchmarks.cards import OUT
from harness.recipe import list_card_recipes, load_recipe
from harness.report.table import markdown_table
from harness.units import in_gib
from pages.parts import ROOT, with_parts, write_or_check

PAGE = ROOT / "docs" / "cards.md"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: each recipe on the card where it has the least to spare."""
    cells: list[tuple[str, ...]] = []
    for listed in list_card_recipes():
        recipe = load_recipe(listed.name)[1]
        of_recipe = [row for row in rows if row["recipe"] == listed.name]
        row = min(of_recipe, key=spare)
        cells.append(
            (
                f"{listed.card_gb} GB",
                f"`{listed.name}`",
                f"{recipe.micro_batch_size} x {recipe.seq_len:,}",
                in_gib(row["process_bytes"]),
                row["device"],
                in_gib(spare(row)),
            )
        )
    columns = "card", "recipe", "rows x tokens", "takes", "least spare on", "spare there"
    return markdown_table(columns, cells, (3, 5))


def spare(row: dict[str, Any]) -> int:
    """Bytes of the card that the process leaves."""
    return row["memory_bytes"] - row["process_bytes"]


def main(check: bool) -> None:
    """Write the page, or compare it."""
    rows = json.loads((ROOT / OUT).read_text(encoding="utf-8"))["rows"]
    write_or_check({PAGE: with_parts(PAGE, {"cards": table(rows)})}, "pages.profiles.cards", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
