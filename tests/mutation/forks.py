"""Tests run with a mutant, in a fork of a process that has imported the libraries.

The file is never written: in the fork the module is imported from the changed text. A fork that a mutant
hangs or makes eat memory is ended by the kernel's count of its processor time and memory.
"""

import contextlib
import importlib.machinery
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

from tests.mutation.mutants import Mutant
from tests.support.places import ROOT

QUIET = [
    "-x",
    "-q",
    "--no-header",
    *(f"-p no:{name}".replace(" ", "") for name in ("cacheprovider", "xdist", "unraisableexception")),
]
MOST_MEMORY_BYTES = 12 * 2**30
OURS = ("harness", "tests", "benchmarks", "pages", "conftest", "__")


@dataclass(frozen=True)
class Outcome:
    """What became of a fork."""

    status: int
    """pytest's exit status: 0 where every test passed; less than 0, the signal that ended it."""
    first_failure: str
    """The test that failed, where one did."""
    cpu_s: float

    @property
    def timed_out(self) -> bool:
        return self.status in (-signal.SIGXCPU, -signal.SIGKILL)


def libraries_of(tests: Sequence[str], limit_s: float) -> tuple[Outcome, list[str]]:
    """Whether `tests` pass as things are, and what they import that is not this project's."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names")

        def body(note: Callable[[str], None], folder: str) -> int:
            status = int(
                pytest.main([*QUIET, f"--basetemp={folder}/tests", *tests], plugins=[_FirstFailure(note)])
            )
            names.write_text("\n".join(name for name in sys.modules if not name.startswith(OURS)))
            return status

        outcome = _in_a_fork(body, limit_s)
        return outcome, names.read_text().split() if names.exists() else []


def run_tests(tests: Sequence[str], mutant: Mutant, limit_s: float) -> Outcome:
    """Whether `tests` pass with the mutant, in a fork that may compute for `limit_s`."""

    def body(note: Callable[[str], None], folder: str) -> int:
        _import_from(mutant)
        arguments = [*QUIET, f"--basetemp={folder}/tests", *tests]
        return int(pytest.main(arguments, plugins=[_FirstFailure(note)]))

    return _in_a_fork(body, limit_s)


def _in_a_fork(body: Callable[[Callable[[str], None], str], int], limit_s: float) -> Outcome:
    folder = tempfile.mkdtemp(prefix="mutant-")
    note = Path(folder, "first_failure")

    def noted(text: str) -> None:
        note.write_text(text)

    child = os.fork()
    if not child:
        status = 70
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            status = body(noted, folder)
        except BaseException as error:
            note.write_text(repr(error)[:200])
        finally:
            os._exit(status)
    ends = time.monotonic() + 60 + 30 * limit_s  # one that sleeps uses no processor
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > ends:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)  # what its tests started
    first = note.read_text() if note.exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(os.waitstatus_to_exitcode(status), first, usage.ru_utime + usage.ru_stime)


class _FirstFailure:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._note(report.nodeid)
            os._exit(1)  # what a session does at its end takes longer than most tests

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(f"{report.nodeid} (at import)")


def _import_from(mutant: Mutant) -> None:
    """The module, where it is imported from now on, is the mutant."""
    path, original = str(ROOT / mutant.path), importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if loader.path == path:
            return compile(mutant.source, path, "exec", dont_inherit=True)
        return original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]
