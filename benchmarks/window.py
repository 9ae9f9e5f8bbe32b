"""The test suite with other releases of the libraries: the ends of what pyproject.toml allows.

    make window
    python -m benchmarks.window oldest|newest --python PYTHON [--path FOLDER] [--workers 2] [TESTS ...]

PYTHON is an interpreter that has the releases of tests/window/oldest.txt or newest.txt, and what the tests
need; FOLDER, made by `pip install --no-deps --target FOLDER PACKAGE==VERSION ...`, comes before what it has.
What happened goes to profiles/cpu/window.json by test file: all of a whole run; of a run of TESTS theirs,
beside what is there of the same releases. `python -m pages.window` shows it, and how many of the test files
have been run. Those of NEED_MORE take no part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.system import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiles" / "cpu" / "window.json"
PINS = ROOT / "tests" / "window"
KINDS = ("passed", "failed", "error", "skipped")
NEED_MORE = ("tests/gpu", "tests/virtual_gpu")
"""Folders of tests that pytest leaves out: they need a GPU, or PyTorch's CUDA build and some GB."""
VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


def pins(end: str) -> dict[str, str]:
    """{"torch": "2.11.0", ...} of tests/window/`end`.txt."""
    lines = (PINS / f"{end}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def _file(case: ET.Element) -> str:
    """Of the test; of a file that could not be imported pytest names only the module."""
    return case.get("file") or f"{case.attrib['name'].replace('.', '/')}.py"


def counts(cases: Iterable[ET.Element]) -> dict[str, dict[str, int]]:
    """How many tests of each file passed, failed, ... from the `testcase` elements of pytest's JUnit XML."""
    found: dict[str, dict[str, int]] = {}
    for case in cases:
        outcome = next(
            (kind for kind in ("error", "failure", "skipped") if case.find(kind) is not None), "passed"
        )
        of_file = found.setdefault(_file(case), dict.fromkeys(KINDS, 0))
        of_file["failed" if outcome == "failure" else outcome] += 1
    return found


def _name(case: ET.Element) -> str:
    return f"{_file(case)}::{case.attrib['name']}"


def _not_passed(cases: Iterable[ET.Element]) -> list[str]:
    return [
        _name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]


def _skipped(cases: Iterable[ET.Element]) -> dict[str, str]:
    """Why, by test, without the path of this checkout."""
    return {
        _name(case): why.get("message", "").replace(f"{ROOT}/", "")
        for case in cases
        if (why := case.find("skipped")) is not None
    }


def _test_files() -> list[str]:
    files = (file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("test_*.py"))
    return [file for file in files if not file.startswith(NEED_MORE)]


def _kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """Run them. Exit status: that of pytest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window")
    parser.add_argument("end", choices=("oldest", "newest"))
    parser.add_argument("--python", required=True)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--workers", default="2")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    path = os.pathsep.join(str(part) for part in (options.path and options.path.resolve(), ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    wanted = pins(options.end)
    versions = [options.python, "-c", VERSIONS, *wanted]
    releases = json.loads(subprocess.check_output(versions, env=environment, cwd=ROOT, text=True))
    releases = {name: version.partition("+")[0] for name, version in releases.items()}
    if other := [
        f"{name} {has}, not {wanted[name]}" for name, has in releases.items() if has != wanted[name]
    ]:
        sys.exit(
            f"{options.python} has {'; '.join(other)}. Install what tests/window/{options.end}.txt says."
        )
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        told = (
            "-o",
            "junit_family=xunit1",
            f"--junitxml={report.name}",
        )  # the older form names each test's file
        pytest = (options.python, "-m", "pytest", "-p", "no:cacheprovider", *told)
        parallel = ("-n", options.workers, "--dist", "loadfile", *options.tests)
        status = subprocess.run([*pytest, *parallel], env=environment, cwd=ROOT, check=False).returncode
        cases = list(ET.parse(report.name).iter("testcase"))
    before = _kept().get(options.end, {})
    again = bool(options.tests) and before.get("releases") == releases
    files = counts(cases)
    kept = before if again else {"files": {}, "not_passed": [], "skipped": {}}
    still = {name for name in (*kept["not_passed"], *kept["skipped"]) if name.partition("::")[0] not in files}
    skipped = {name: why for name, why in kept["skipped"].items() if name in still} | _skipped(cases)
    all_files = kept["files"] | files
    entry = {
        "releases": releases,
        "test_files": len({*_test_files(), *all_files}),  # of NEED_MORE some need nothing
        "date": datetime.now(UTC).date().isoformat(),
        "files": dict(sorted(all_files.items())),
        "not_passed": sorted([*still.intersection(kept["not_passed"]), *_not_passed(cases)]),
        "skipped": dict(sorted(skipped.items())),
    }
    write_whole(RESULTS, json.dumps(_kept() | {options.end: entry}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
