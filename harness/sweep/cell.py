"""Answers one cell of a sweep, for all but napkin in a process of its own. Imports no torch itself.

Whatever goes wrong becomes an outcome with its reason, and the sweep goes on.
"""

import json
import os
import signal
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from harness.answers import measured, predicted
from harness.errors import HarnessError, InputError
from harness.hardware import find_hardware
from harness.recipe import Recipe
from harness.run_folder import RunFolder
from harness.step_profile import Quantity, StepProfile
from harness.sweep.plan import Cell, Kind
from harness.system import quiet_libraries
from harness.units import in_gib

Status = Literal["ok", "out_of_memory", "refused", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. `reason` is one sentence, and None only when all went well."""

    status: Status
    reason: str | None = None
    profile: StepProfile | None = None
    """The answer; None where the cell was refused, failed, or ran out of the host's memory."""
    seconds: Quantity = 0.0
    """How long the answer took, by the clock."""
    traceback: str | None = None
    """The traceback of a cell that failed."""

    def as_json(self) -> dict[str, Any]:
        """The outcome as plain data for JSON."""
        profile = None if self.profile is None else self.profile.model_dump(mode="json")
        return {**self.__dict__, "profile": profile}

    @classmethod
    def from_json(cls, document: Any, origin: str) -> "Outcome":
        """The outcome that `as_json` wrote. Raises InputError naming `origin` for anything else."""
        try:
            outcome = TypeAdapter(cls).validate_python(document)
        except ValidationError:
            outcome = None
        went_well = outcome is not None and outcome.status == "ok"
        if outcome is None or went_well != (outcome.reason is None) or (went_well and not outcome.profile):
            raise InputError(f"{origin} is not the outcome of a sweep's cell. Remove it.")
        return outcome


def answer(kind: Kind, recipe: Recipe, hardware: str | None, device: str | None = None) -> Outcome:
    """The answer about `recipe`: by napkin or simulation for `hardware`, or measured on `device`."""
    begun = time.perf_counter()
    try:
        if kind != "measured":
            profile = predicted(kind, recipe, find_hardware(hardware) if hardware else None)
        else:
            with tempfile.TemporaryDirectory(prefix="harness-cell-") as folder:
                profile = measured(recipe, RunFolder(Path(folder) / "run", "cell", recipe), device)
    except InputError as error:
        outcome: dict[str, Any] = {"status": "refused", "reason": str(error)}
    except MemoryError:
        outcome = {"status": "out_of_memory", "reason": "the host's memory ran out"}
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
        first_line = what.strip().splitlines()[0]
        outcome = {"status": "failed", "reason": first_line, "traceback": traceback.format_exc()}
    else:
        status, reason = "ok", None
        if profile.oom is not None:
            status, reason = "out_of_memory", out_of_memory_reason(profile)
        elif profile.not_finite is not None and not profile.complete:
            status, reason = "failed", f"stopped: {profile.not_finite.in_words()}"
        outcome = {"status": status, "reason": reason, "profile": profile}
    return Outcome(**outcome, seconds=time.perf_counter() - begun)


def answer_in_process(sender: Connection, cell: Cell, kind: Kind, device: str | None) -> None:
    """What the process of a cell does: it sends the answer as JSON through `sender`, and nothing else.

    It ignores Ctrl-C, which a terminal sends to it too: the sweep decides. It ends when the sweep does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_sweep, daemon=True).start()
    os.dup2(2, 1)  # stdout belongs to the sweep's table
    quiet_libraries()
    assert cell.recipe is not None
    outcome = answer(kind, cell.recipe, cell.hardware, device)
    sender.send_bytes(json.dumps(outcome.as_json()).encode())
    sender.close()


def out_of_memory_reason(profile: StepProfile) -> str:
    """Where the memory ran out, in one phrase."""
    assert profile.oom is not None
    where, requested = f"out of memory in {profile.oom.phase}", profile.oom.requested_bytes
    if profile.source == "napkin":
        return f"{where}: the peak is {in_gib(profile.memory.peak_allocated_bytes)}"
    return where if requested is None else f"{where}, asking for {in_gib(requested)}"


def _end_with_the_sweep() -> None:
    """Wait for the end of the sweep's process, and end this one with it."""
    sweep = parent_process()
    if sweep is not None:
        sweep.join()
        os._exit(1)  # a measurement that nothing waits for would hold the device
