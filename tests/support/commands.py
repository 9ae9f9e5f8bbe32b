"""The command line, called in the test's own process or in one of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Ended = subprocess.CompletedProcess[str]
Call = Callable[..., tuple[int, str, str]]
"""`harness *words`: exit status, stdout, stderr."""


def exit_status(*words: object) -> int:
    """Of `harness *words`."""
    from harness.cli.app import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["harness", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)


def run_harness(
    *words: str, cwd: Path, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`harness *words` in a process of its own, which is to end with `status`: what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | environment,
        timeout=3600,
        check=False,
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-4000:]
    return done
