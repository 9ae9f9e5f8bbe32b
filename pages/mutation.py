"""docs/mutation.md from docs/data/mutation.json, which `make mutate` writes: what the tests do not notice.

python -m pages.mutation            write it
python -m pages.mutation --check    fail if it is not so
"""

import json
import sys
import tomllib
from typing import Any

from harness.report.table import markdown_table
from pages.links import DOCS
from pages.parts import write_or_check

MODULES = DOCS.parent / "tests/mutation/modules.toml"
RESULTS = DOCS / "data/mutation.json"
PAGE = DOCS / "mutation.md"
INTRODUCTION = """\
# What the tests would not notice

A test that passes says little until it is known to fail. `make mutate` changes the code in one place at a
time (a `+` becomes a `-`, a `<` a `<=`, a number one more, a call is left out), runs the tests that hold that
code, and looks whether one of them fails. A change that no test notices is a survivor: either it changes
nothing that anybody could see, or it is a gap. This page is written from what came out.

The changes are those of [mutmut](https://mutmut.readthedocs.io) and three more: a call whose result nobody
takes is left out, an error is not raised, and a bare condition is turned round. Annotations, decorators,
imports and the words of messages stay as they are. Where a module has more mutants than are tried, the sample
is drawn by a hash, so that it is the same on every machine, and nearly the same after a small edit. Which
tests hold which module is in `tests/mutation/modules.toml`. Of what survives them, the rest of the suite
might still notice something.

What survived at first was given tests. So the first run, and not the last, says how many survivors are to be
expected among the mutants that were not tried.
"""
COUNTS = ("code", "mutants", "tried", "survived at first", "a test fails", "runs too long", "survive", "gaps")


def page(modules: list[dict[str, Any]]) -> str:
    """The Markdown of the whole page."""
    return "".join(
        [INTRODUCTION, *_modules(modules), *_not_tried(modules), *_named(modules), *_survivors(modules)]
    )


def _not_tried(modules: list[dict[str, Any]]) -> list[str]:
    """A sentence about modules that are listed and have no row: nobody tried them, or gaps are still open."""
    listed = tomllib.loads(MODULES.read_text(encoding="utf-8"))["module"]
    absent = [row["title"] for row in listed if row["name"] not in {row["name"] for row in modules}]
    return [f"\nListed, and without a finished result: {', '.join(absent)}.\n"] if absent else []


def _modules(modules: list[dict[str, Any]]) -> list[str]:
    numbers = ("mutants", "tried", "survived_at_first", "killed", "timed_out")
    total: dict[str, Any] = {key: sum(row[key] for row in modules) for key in numbers}
    total |= {"title": "all", "survivors": [each for row in modules for each in row["survivors"]]}
    table: list[tuple[str, ...]] = []
    for row in (*modules, total):
        gaps = sum(survivor["judgement"] == "gap" for survivor in row["survivors"])
        first, alive = (
            _share(number, row["tried"]) for number in (row["survived_at_first"], len(row["survivors"]))
        )
        counts = (row["title"], f"{row['mutants']:,}", f"{row['tried']:,}", first)
        table.append((*counts, f"{row['killed']:,}", str(row["timed_out"]), alive, str(gaps)))
    return [
        "\n## Module by module\n\n",
        "A mutant that never ends, or that a limit on its memory ends, is noticed as well.\n\n",
        markdown_table(COUNTS, table, range(1, len(COUNTS))),
    ]


def _share(number: int, whole: int) -> str:
    return f"{number} ({number / whole:.1%})"


def _named(modules: list[dict[str, Any]]) -> list[str]:
    table = [
        (
            row["what"],
            f"`{row['file'].removeprefix('harness/')}`",
            _code(row["killed_by"].removeprefix("tests/")) if row["killed_by"] else "**none**",
        )
        for module in modules
        for row in module["named"]
    ]
    return [
        "\n## Mutants that were once alive\n\n",
        "Somebody made each of these by hand and saw every test pass. They are tried every time.\n\n",
        markdown_table(("change", "file", "the test that fails"), table),
    ]


def _survivors(modules: list[dict[str, Any]]) -> list[str]:
    said = "Each with the reason why no test can tell it from the original, or with what is missing.\n"
    lines = ["\n## Survivors\n\n", said if any(row["survivors"] for row in modules) else "None.\n"]
    for module in modules:
        if module["survivors"]:
            lines.append(f"\n### {module['title'].capitalize()}\n\n")
        for each in module["survivors"]:
            where = f"{each['file'].removeprefix('harness/')}:{each['line']}"
            change = f"{_code(each['was'])} → {_code(each['becomes']) if each['becomes'] else 'left out'}"
            lines.append(f"- {where}: {change}. **{each['judgement'].capitalize()}**: {each['why']}\n")
    return lines


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    written = {PAGE: page(json.loads(RESULTS.read_bytes()))}
    write_or_check(written, "pages.mutation", check="--check" in sys.argv[1:])
