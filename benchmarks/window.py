"""The test suite with other releases of the libraries: the ends of what pyproject.toml allows.

    python -m benchmarks.window oldest --python PYTHON [--path FOLDER] [TESTS ...]
    python -m benchmarks.window newest --python PYTHON

PYTHON is an interpreter that has the releases and what the tests need; FOLDER, made with
`pip install --no-deps --target FOLDER PACKAGE==VERSION ...`, comes before what it has. The test files run one
after the other, each in a process of its own. What happened goes to profiles/cpu/window.json after each, and
a file that has been run with the same releases is not run again. `python -m pages.window` shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.system import write_whole

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "profiles" / "cpu" / "window.json"
RELEASES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate", "numpy", "pydantic", "typer")
VERSIONS = f"""
import importlib.metadata, json
print(json.dumps({{name: importlib.metadata.version(name) for name in {RELEASES}}}))
"""
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-m", "not gpu and not virtual_gpu")
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


def counts(output: str) -> dict[str, int]:
    """{"passed": 3, "failed": 1} of the last lines that pytest printed."""
    last = [line for line in output.splitlines() if COUNT.search(line)][-1:]
    found = {kind.removesuffix("s"): int(number) for line in last for number, kind in COUNT.findall(line)}
    return {kind: found.get(kind, 0) for kind in ("passed", "failed", "error", "skipped")}


def test_files(asked: list[str]) -> list[str]:
    """Every test file in these folders, by its path in the checkout."""
    paths = [ROOT / name for name in asked or ["tests"]]
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}
    return sorted(str(file.relative_to(ROOT)) for file in files)


def _kept() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def main(arguments: list[str] | None = None) -> int:
    """Run them. Exit status 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.window")
    parser.add_argument("name", choices=("oldest", "newest"))
    parser.add_argument("--python", required=True)
    parser.add_argument("--path", type=Path)
    parser.add_argument("tests", nargs="*")
    options = parser.parse_intermixed_args(arguments)
    path = os.pathsep.join(str(part) for part in (options.path and options.path.resolve(), ROOT) if part)
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [options.python, *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )

    releases = json.loads(run("-c", VERSIONS).stdout)
    entry = _kept().get(options.name, {})
    if entry.get("releases") != releases:
        entry = {"releases": releases, "date": "", "files": {}}
    for file in test_files(options.tests):
        if file in entry["files"]:
            continue
        found = counts(run(*PYTEST, "-o", "addopts=--strict-markers --import-mode=importlib", file).stdout)
        entry["files"][file] = found
        entry["date"] = datetime.now(UTC).date().isoformat()
        write_whole(RESULTS, json.dumps(_kept() | {options.name: entry}, indent=1) + "\n")
        print(file, found, flush=True)
    return int(any(of["failed"] + of["error"] for of in entry["files"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
