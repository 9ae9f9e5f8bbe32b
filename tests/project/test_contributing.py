"""What CONTRIBUTING says is so: its paths, its commands, its walk down; and the map is of the imports."""

import cProfile
import re
import tomllib

from typer.testing import CliRunner

from harness.cli.app import app
from pages import map as package_map
from tests.support.places import ROOT

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
STOPS = re.findall(r"^\d\. `(harness/[\w/]+\.py)`: `([\w.]+)`", TEXT, re.MULTILINE)
"""Of the walk: a file, and what of it runs there."""


def test_every_path_is_there() -> None:
    paths = re.findall(r"`((?:harness|tests|pages|docs|profiles|recipes|benchmarks)/[\w./]*)`", TEXT)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / target).exists(), target


def test_every_command_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"(?:^|`)make ([\w-]+)", TEXT, re.MULTILINE)
    assert len(targets) >= 6
    assert all(f"\n{target}:" in makefile for target in targets)
    modules = re.findall(r"python -m ([\w.]+\w)", TEXT)
    assert modules
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_the_walk_goes_down_in_at_most_eight_stops() -> None:
    assert 5 <= len(STOPS) <= 8
    packages = [file.split("/")[1] for file, _ in STOPS]
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    levels = [
        n for name in packages for n, level in enumerate(linted["layers"]) if name in level.split(" | ")
    ]
    assert levels == sorted(levels)
    assert (packages[0], packages[-1]) == ("cli", "allocator")


def test_the_walk_is_what_runs() -> None:
    with cProfile.Profile() as profile:
        result = CliRunner().invoke(app, ["simulate", "smoke", "micro_batch_size=4"])
    assert result.exit_code == 0, result.output
    ran = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
    called = {(code.co_filename.removeprefix(f"{ROOT}/"), code.co_qualname) for code in ran}
    assert set(STOPS) - called == set()


def test_it_is_two_pages_at_most() -> None:
    assert len(TEXT.splitlines()) <= 100
    assert len(TEXT) < 7000


def test_the_map_s_rows_go_down() -> None:
    found = package_map.imports()
    row = {package: n for n, row in enumerate(package_map.rows(found)) for package in row}
    assert len(row) > 20
    assert all(row[other] > row[package] for package, theirs in found.items() for other in theirs)
    drawn = package_map.direct(found)
    assert all(drawn[package] <= found[package] for package in found)

    # what is not drawn is still reached on what is
    def reached(package: str) -> set[str]:
        return drawn[package].union(*map(reached, drawn[package]))

    assert all(found[package] <= reached(package) for package in found)
