"""Commands in forks of one process that has imported everything, each killed at a chosen moment.

Starting Python and importing torch takes seconds, a command's own work here less than one: from a fork, the
moments of a kill fall into that work. `python -m tests.support.forked` is the process that forks; Forks
talks to it.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.support.places import ROOT

LONGEST_S = 120


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit status (or minus the signal that killed it), output, seconds."""

    status: int
    printed: str
    seconds: float


class Forks:
    """A process that has imported torch and the rest, waiting for commands to run in forks of itself."""

    def __enter__(self) -> "Forks":
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        signal: int | None = None,
        after_s: float = 0.0,
        again_after_s: float | None = None,
        ordinary: bool = False,
    ) -> Ended:
        """`harness *arguments` in `folder`, sent `signal` after so many seconds, and `again_after_s` later
        once more. `ordinary`: without root's right to read and write everything.
        """
        order = {"arguments": list(arguments), "folder": str(folder), "signal": signal, "after_s": after_s}
        order |= {"again_after_s": again_after_s, "ordinary": ordinary}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Ended(**json.loads(self._process.stdout.readline()))


def serve() -> None:
    """Import everything, then run one command for each line of stdin."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (what a command would import)

    import harness.cli.app
    import harness.measure.measured_run
    import harness.report  # noqa: F401
    from harness.cli import script

    for line in sys.stdin:
        print(json.dumps(_run(script, **json.loads(line))), flush=True)


def _run(
    script: Callable[[], NoReturn],
    arguments: list[str],
    folder: str,
    signal: int | None,
    after_s: float,
    again_after_s: float | None,
    ordinary: bool,
) -> dict[str, Any]:
    printed = Path(folder) / ".printed"
    has_begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        _become(script, arguments, folder, printed, begins, ordinary)
    os.close(begins)
    os.read(has_begun, 1)
    os.close(has_begun)
    begun = time.perf_counter()
    if signal is not None:
        time.sleep(after_s)
        os.kill(child, signal)  # a child that has ended keeps its number until it is waited for
        if again_after_s is not None:
            time.sleep(again_after_s)
            os.kill(child, signal)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        if time.perf_counter() - begun > LONGEST_S:
            os.kill(child, 9)
            raise TimeoutError(f"{arguments} still runs after {LONGEST_S} s")
        time.sleep(0.005)
    seconds = time.perf_counter() - begun
    text = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    printed.unlink(missing_ok=True)
    return {"status": os.waitstatus_to_exitcode(status), "printed": text, "seconds": seconds}


def _become(
    script: Callable[[], NoReturn],
    arguments: list[str],
    folder: str,
    printed: Path,
    begins: int,
    ordinary: bool,
) -> None:
    status = 1
    try:
        output = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if ordinary and os.geteuid() == 0:
            header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            if ctypes.CDLL(None, use_errno=True).capset(header, nothing):  # man 2 capset, version 3
                raise OSError(ctypes.get_errno(), "capset")
        os.chdir(folder)
        sys.argv = ["harness", *arguments]
        os.write(begins, b".")
        script()
    except KeyboardInterrupt:  # before the command answers signals: what Python itself does
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
