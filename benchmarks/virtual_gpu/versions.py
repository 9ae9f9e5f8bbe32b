"""Which tests of the virtual GPU pass with the PyTorch of this interpreter: a row of a table of versions.

    python -m benchmarks.virtual_gpu.versions [--out FILE] [--workers N] [PYTEST OPTION ...]

Run it once in each environment that has another PyTorch; a row of the same PyTorch is replaced. An option
like `-k values` chooses among the tests, and stands in the row.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.command import GrowingTable, parser_of
from harness.errors import InputError
from harness.system import installed_version
from harness.virtual_gpu.build import installed_torch

CHOSEN = ("-m", "virtual_gpu and not slow")
QUIET = ("-q", "-p", "no:cacheprovider", "-p", "no:warnings")
LIBRARIES = ("triton", "transformers", "peft", "trl", "accelerate", "bitsandbytes")


def row(options: list[str], workers: int) -> dict[str, Any]:
    """Versions, the tests that were chosen, how many passed, failed and were skipped, and which failed."""
    torch = installed_torch()
    found: dict[str, Any] = {
        "torch": torch and torch.version,
        "cuda": torch and torch.cuda_version,
        "libraries": {name: installed_version(name) for name in LIBRARIES},
        "chosen": " ".join([*CHOSEN, *options]),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", "tests/virtual_gpu", *CHOSEN, *QUIET]
        command += [f"-n{workers}", *options]
        done = subprocess.run([*command, f"--junit-xml={path}"], check=False)
        if done.returncode not in (0, 1):  # passed, failed; otherwise it did not run them all
            raise InputError(f"pytest ended with status {done.returncode}: no row was written.")
        cases = list(ElementTree.parse(path).iter("testcase"))
    outcomes = {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}
    counts = Counter(outcomes.values())
    found |= {outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")}
    found["which_failed"] = sorted(name for name, outcome in outcomes.items() if outcome == "failed")
    return found


def _outcome(case: ElementTree.Element) -> str:
    if case.find("skipped") is not None:
        return "skipped"
    return "passed" if case.find("failure") is None and case.find("error") is None else "failed"


def _release(row: dict[str, Any]) -> list[int]:
    return [int(part) for part in row["torch"].split(".")[:2]]


def main() -> int:
    """Exit status: 1 if a test failed, or none ran."""
    parser = parser_of("benchmarks.virtual_gpu.versions", __doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest; 0: none but its own")
    options, others = parser.parse_known_args()
    here = row(others, options.workers)
    print(json.dumps(here, indent=1))
    GrowingTable(options.out, {}, itemgetter("torch", "cuda"), same=(), order=_release).add(here)
    return int(here["failed"] > 0 or not here["passed"])


if __name__ == "__main__":
    sys.exit(main())
