"""The support window: its oldest releases are pyproject.toml's bounds, and what pytest said is counted."""

import json
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from benchmarks import window
from harness.system.torch_release import TorchRelease
from pages import window as window_page
from tests.support.places import ROOT

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.skip(reason="no")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError
def test_errs(broken): pass
"""


def test_the_lower_bounds_are_the_oldest_releases_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(text.split(">=") for text in project["dependencies"])
    oldest = window.pins("oldest")
    assert "torch" in bounds
    for name, bound in bounds.items():
        assert oldest[name] in (bound, f"{bound}.0"), name


def test_the_newest_are_those_of_every_day_or_newer() -> None:
    """Else `make window` would test something that is neither."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    daily = dict(line.partition(";")[0].split("==") for line in lines if "==" in line and line[0] != "#")

    def numbers(release: str) -> list[int]:
        return [int(part) for part in release.strip().split(".")]

    for name, newest in window.pins("newest").items():
        assert numbers(newest) >= numbers(daily[name]) >= numbers(window.pins("oldest")[name]), name


def test_the_releases_of_torch_are_those_whose_differences_have_names() -> None:
    first, last = (TorchRelease.of(window.pins(end)["torch"]) for end in ("oldest", "newest"))
    assert TorchRelease.__doc__
    assert f"from {first.major}.{first.minor}" in TorchRelease.__doc__
    assert f"to {last.major}.{last.minor}" in TorchRelease.__doc__


def test_what_pytest_said_is_counted_by_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "test_four.py").write_text(TESTS)
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    report = tmp_path / "report.xml"
    pytest_run = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "no:cacheprovider", "-n", "1"]
    subprocess.run(
        [*pytest_run, "--rootdir=.", "-o", "junit_family=xunit1", f"--junitxml={report}", "."],
        cwd=tmp_path, capture_output=True, check=False,
    )  # fmt: skip
    cases = list(ET.parse(report).iter("testcase"))
    nothing = dict.fromkeys(window.KINDS, 0)
    assert window.counts(cases) == {
        "test_broken.py": nothing | {"error": 1},
        "test_four.py": dict.fromkeys(window.KINDS, 1),
    }


def test_an_interpreter_with_other_releases_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(window, "RESULTS", tmp_path / "window.json")
    monkeypatch.setattr(window, "pins", lambda end: {"pytest": "0.1"})
    with pytest.raises(SystemExit, match=r"pytest .*, not 0\.1"):
        window.main(["oldest", "--python", sys.executable])


def test_a_file_run_again_replaces_what_was_said_of_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(window, "RESULTS", tmp_path / "window.json")
    monkeypatch.setattr(window, "pins", lambda end: {"pytest": pytest.__version__})
    other = {"releases": {"pytest": pytest.__version__}, "files": {"tests/x.py": {"passed": 1}}, "date": ""}
    name = "tests/project/test_contributing.py"
    failed = {"not_passed": [f"{name}::test_it_is_two_pages_at_most", "tests/x.py::test_y"]}
    skipped = {"skipped": {f"{name}::test_gone": "no", "tests/x.py::test_z": "no GPU"}}
    window.RESULTS.write_text(json.dumps({"oldest": other | failed | skipped}))
    test = f"{name}::test_it_is_two_pages_at_most"
    assert window.main(["oldest", "--python", sys.executable, "--workers", "0", test]) == 0
    written = json.loads(window.RESULTS.read_text())["oldest"]
    assert written["files"] == {
        name: dict.fromkeys(window.KINDS, 0) | {"passed": 1},
        "tests/x.py": {"passed": 1},
    }
    assert written["not_passed"] == ["tests/x.py::test_y"]
    assert written["skipped"] == {"tests/x.py::test_z": "no GPU"}
    assert written["test_files"] > 100


def test_the_page_says_what_failed_and_why_tests_were_skipped() -> None:
    releases = dict.fromkeys(window_page.SHOWN, "1.0")
    files = {"tests/x.py": {"passed": 4, "failed": 1, "error": 0, "skipped": 2}}
    entry: dict[str, Any] = {"releases": releases, "date": "", "files": files, "test_files": 3}
    skipped = {f"tests/x.py::test_{name}": "no GPU" for name in "ab"}
    said = window_page.table({"oldest": entry | {"not_passed": ["tests/x.py::test_c"], "skipped": skipped}})
    assert "| 1 of 3 | 4 | 1 | 0 | 2 |" in said
    assert "- oldest: 1 in `tests/x.py`\n" in said
    assert "- oldest: 2 in `tests/x.py`: no GPU\n" in said
