"""docs/contributing.md's table of the toggles: which files of harness/ read the field of each.

python -m pages.toggle_reads            write the table
python -m pages.toggle_reads --check    fail if it is not so

What a toggle costs whoever adds or changes one. Read from the source: an attribute of that name of anything
that is called a recipe. What follows from a field through a property of Recipe is not a read of the field.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from harness.recipe import EFFECTS, Recipe
from harness.system import write_whole

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT / "harness"
SIZES = (
    "model",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "seq_len",
    "lora_rank",
    "lora_dropout",
    "weight_decay",
)
"""Fields that are numbers or names and no switch: every part of the arithmetic needs them."""
TOGGLES = tuple(field for field in Recipe.model_fields if field not in EFFECTS and field not in SIZES)
PAGE = ROOT / "docs" / "contributing.md"
BEGIN, END = "<!-- toggles: written by pages/toggle_reads.py -->\n", "<!-- end of toggles -->\n"
FIELDS = "recipe/fields.py"
RULES = "recipe/rules.py"


def is_recipe(node: ast.expr, file: str) -> bool:
    """Whether the expression is called a recipe: `recipe`, `self._recipe`, `run.recipe`; `r` in a rule."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in ("recipe", "asked", "loaded", "base") or (file == RULES and name == "r")


def reads() -> dict[str, set[str]]:
    """By toggle, the files that read its field, as paths below harness/; fields and rules are not counted."""
    found: dict[str, set[str]] = {toggle: set() for toggle in TOGGLES}
    for path in sorted(HARNESS.rglob("*.py")):
        file = str(path.relative_to(HARNESS))
        if file in (FIELDS, RULES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in found and is_recipe(node.value, file):
                found[node.attr].add(file)
    return found


def with_table(page: str) -> str:
    """The page with the table between its markers."""
    rows = [("toggle", "files", "where"), ("---", "---:", "---")]
    rows += [(f"`{name}`", str(len(files)), ", ".join(sorted(files))) for name, files in reads().items()]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table}{END}{rest.split(END)[1]}"


def main(check: bool) -> None:
    """Write the table, or compare it."""
    text = PAGE.read_text(encoding="utf-8")
    if check and with_table(text) != text:
        sys.exit("docs/contributing.md is not as written. Run: python -m pages.toggle_reads")
    if not check:
        write_whole(PAGE, with_table(text))


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
