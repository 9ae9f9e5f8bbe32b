"""The mutation report: it is of the modules that are listed, and every survivor has a judgement."""

import json
import tomllib

import pytest

from pages import mutation
from tests.support.places import ROOT

MODULES = tomllib.loads((ROOT / "tests/mutation/modules.toml").read_text(encoding="utf-8"))["module"]
JUDGED = tomllib.loads((ROOT / "tests/mutation/judged.toml").read_text(encoding="utf-8"))["survivor"]
REPORT = json.loads(mutation.RESULTS.read_bytes())
MOST_SURVIVORS = 0.05


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module["name"])
def test_what_is_listed_is_there(module):
    assert all((ROOT / path).is_file() for path in module["files"])
    assert all((ROOT / path).exists() for path in module["tests"])
    for named in module.get("named", []):
        source = (ROOT / named["file"]).read_text(encoding="utf-8")
        assert source.count(named["was"]) == 1, named["what"]


def test_the_report_is_of_these_modules():
    modules = {module["name"]: module for module in MODULES}
    names = [row["name"] for row in REPORT]
    assert names == [name for name in modules if name in names] != []
    for row in REPORT:
        module = modules[row["name"]]
        assert (row["title"], row["files"]) == (module["title"], module["files"])
        assert 0 < row["tried"] <= module["sample"]
        assert row["tried"] == row["killed"] + row["timed_out"] + len(row["survivors"])
        assert [named["what"] for named in row["named"]] == [
            named["what"] for named in module.get("named", [])
        ]


def test_every_survivor_is_judged_with_a_reason():
    for row in REPORT:
        for survivor in row["survivors"]:
            assert survivor["judgement"] in ("equivalent", "gap"), survivor
            assert len(survivor["why"].split()) > 3, survivor
    assert all(row["judgement"] in ("equivalent", "gap") for row in JUDGED)


@pytest.mark.parametrize("row", REPORT, ids=lambda row: row["name"])
def test_few_survive_and_none_that_was_found_by_hand(row):
    gaps = [survivor for survivor in row["survivors"] if survivor["judgement"] == "gap"]
    assert len(gaps) <= MOST_SURVIVORS * row["tried"]
    assert all(named["killed_by"] for named in row["named"])
