"""docs/trust.md is what its results say, and the results are those of tests that exist."""

import json
import re

from pages.trust import PAGE, RESULTS, page
from tests.support.places import TESTS

ROWS = json.loads(RESULTS.read_bytes())


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(ROWS)


def test_every_row_names_a_test_that_is_there() -> None:
    assert ROWS
    for row in ROWS:
        file, _, name = row["test"].partition("::")
        assert re.search(rf"^def {name}\(", (TESTS / file).read_text(encoding="utf-8"), re.M), row["test"]


def test_the_page_has_what_it_promises() -> None:
    tries = {
        area: sum(row["times"] for row in ROWS if row["area"] == area) for area in {r["area"] for r in ROWS}
    }
    assert tries["Fuzzed input"] >= 20_000
    assert tries["Hostile pickles"] >= 30
    assert {
        "Killed at a random moment",
        "Disk full",
        "Secrets",
        "Recipes are data",
        "The lock",
    } <= tries.keys()
    for command in ("run", "sweep", "report"):
        of_command = [row for row in ROWS if row["fault"].startswith(f"`harness {command}`, SIG")]
        of_command += [row for row in ROWS if row["fault"].startswith(f"`harness {command} --napkin`, SIG")]
        assert sum(row["times"] for row in of_command) >= 50, command


def test_a_cell_cannot_end_its_row() -> None:
    row = {"area": "A", "fault": "a | b", "outcome": "c\nd", "times": 1, "test": "t.py::t"}
    assert "| a \\| b | 1 | c d | `t.py::t` |\n" in page([row])
