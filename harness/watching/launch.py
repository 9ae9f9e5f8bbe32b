"""Starts a command so that its Python processes are watched, and waits for its end."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.run_folder import FILES, RANKS, profiles_of_ranks, put_folder_together, without_secrets
from harness.system import PACKAGE, make_folder
from harness.virtual_gpu import Options, not_found, surroundings

STARTUP = Path(__file__).parent / "startup"
"""The folder put on PYTHONPATH: its sitecustomize.py waits for a loop in every Python process."""


def parse_steps(text: str) -> tuple[int, int]:
    """The first and the last step to record: "3-5", or "4" for one. Raises InputError."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise InputError(
            f"--steps {text}: give the first and the last step to record, counted from 1: --steps 3-5."
        )
    return first, last


def run_watched(
    command: Sequence[str],
    steps: tuple[int, int],
    out: Path,
    gpus: Options | None,
    *,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
) -> int:
    """Run `command` until it ends, watched, on virtual GPUs if `gpus` is given, and make the run's profile of
    its ranks' where it had several. Returns its exit status, or 128 + the signal that ended it.

    `environment` has variables in addition to this process's, and `output` is a file for what it prints.
    Raises InputError for a command that does not exist or cannot be run, and for a folder that is taken or
    cannot be made.
    """
    if not command:
        raise InputError("there is no command. Write it after --: harness watch -- python train.py")
    given = {**os.environ, **(environment or {})}
    environment = given if gpus is None else surroundings(gpus, given)
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise InputError(not_found(command[0]))
    taken = [name for name in (*FILES, RANKS) if os.path.lexists(out / name)]
    if taken:
        raise InputError(f"--out {out}: it already holds a {taken[0]}. Give another folder, or remove it.")
    make_folder(out)
    first, last = steps
    environment["HARNESS_WATCH"] = json.dumps(
        {
            "out": str(out.absolute()),
            "command": without_secrets(command),
            "first": first,
            "last": last,
            "harness": str(PACKAGE.parent),
        }
    )
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *([before] if before else [])])
    try:
        with nullcontext() if output is None else output.open("wb") as file:
            process = subprocess.Popen([program, *command[1:]], env=environment, stdout=file, stderr=file)
    except OSError as error:
        with suppress(OSError):
            out.rmdir()  # if it is empty
        raise InputError(
            f"{program} cannot be run: {error.strerror}. Give a program, or a script whose first line names "
            "its interpreter."
        ) from None
    status = _waited_for(process)
    if ranks := profiles_of_ranks(out):
        put_folder_together(out, ranks)
    return status


def _waited_for(process: subprocess.Popen[bytes]) -> int:
    """The exit status of the command. Signals are passed on to it, and it alone decides what they end."""

    def forward(number: int, _: Any) -> None:
        process.send_signal(number)

    def leave(number: int, _: Any) -> None:
        """Ctrl-C reaches the command by itself: the terminal sends it to both."""

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, leave)
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - status if status < 0 else status
