"""Runs the cells of a sweep: kept answers are read, the others are asked for and kept.

A napkin cell is answered here. Every other cell has a process of its own, forked from a server that has
imported the libraries once, so that a crash or running out of memory is an outcome. Imports no torch.
"""

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.sweep.cell import Outcome, answer, answer_in_process
from harness.sweep.folder import KEPT, cell_key, read_outcome, write_outcome
from harness.sweep.launchers import Question, RemoteLauncher, outcomes
from harness.sweep.plan import Cell, Plan
from harness.track import Told, profile_values, recipe_config


def tracked_cells(plan: Plan, rows: "Iterable[Row]", folder: Path, files: Sequence[Path]) -> list[Told]:
    """A run for the trackers for each cell that was answered now and has a profile, and one that keeps the
    sweep's `files`. Cells that were kept before are left out: the tracker has them already.
    """
    runs: list[Told] = []
    for row in rows:
        recipe, profile = row.cell.recipe, row.outcome.profile
        if row.kept or recipe is None or profile is None:
            continue
        config = recipe_config(recipe.model_dump(mode="json"))
        config |= {"hardware": profile.hardware.name, "status": row.outcome.status}
        name, steps = f"{plan.name} {row.cell.label}", [(0, profile_values(profile))]
        runs.append(Told(name, str(folder), config, steps))
    if runs:
        config = recipe_config({"recipe": plan.name, "source": plan.kind, **plan.axes})
        kept = [str(file) for file in files]
        runs.append(Told(f"{plan.name} sweep", str(folder), config, [], files=kept))
    return runs


# imported once by the server that cells are forked from
PRELOADED = [
    "harness.sweep.cell",
    "harness.simulate.simulated_run",
    "harness.measure.measured_run",
    "transformers.modeling_utils",
]


@dataclass(frozen=True)
class Row:
    """A finished cell."""

    cell: Cell
    outcome: Outcome
    kept: bool = False
    """Whether its outcome was kept from before and only read."""


def run_cells(
    plan: Plan,
    folder: Path,
    jobs: int = 1,
    device: str | None = None,
    launcher: RemoteLauncher | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Generator[Row]:
    """Every cell of the plan when it is finished: kept and refused cells first.

    `jobs` cells run at the same time: in processes of this machine, or where `launcher` starts them. `tell`
    is called with a sentence about each cell that is started again. Closing the iterator ends running cells;
    what was yielded has been written. Raises InputError when it cannot be written, or a cell cannot be
    started.
    """
    machine = None if launcher is None else launcher.machine
    waiting: list[Question] = []
    for cell in plan.cells:
        key = cell_key(cell, plan.kind, device, machine)
        kept = read_outcome(folder, key)
        if kept is not None and kept.status in KEPT:
            yield Row(cell, kept, kept=True)
        elif cell.recipe is None:
            yield _written(folder, key, cell, Outcome("refused", cell.refusal))
        else:
            waiting.append(Question(key, cell, plan.kind, device))
    if plan.kind == "napkin":
        for question in waiting:
            assert question.cell.recipe is not None
            outcome = answer("napkin", question.cell.recipe, question.cell.hardware)
            yield _written(folder, question.key, question.cell, outcome)
    elif waiting:
        with closing(outcomes(launcher or Processes(), waiting, jobs, tell)) as found:
            for question, outcome in found:
                yield _written(folder, question.key, question.cell, outcome)


def _written(folder: Path, key: str, cell: Cell, outcome: Outcome) -> Row:
    write_outcome(folder, key, cell, outcome)
    return Row(cell, outcome)


@dataclass(eq=False)
class _Running:
    """A cell at work in a process of this machine."""

    cell: Cell
    process: Any
    receiver: Connection
    begun: float


class Processes:
    """The launcher of this machine. A cell that crashes is not started again: the crash is its own fault."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)

    def start(self, question: Question) -> _Running:
        receiver, sender = self._context.Pipe(duplex=False)
        arguments = (sender, question.cell, question.kind, question.device)
        process = self._context.Process(target=answer_in_process, args=arguments, daemon=True)
        process.start()
        sender.close()  # the process has its own: when that one closes, the receiver sees the end
        return _Running(question.cell, process, receiver, time.perf_counter())

    def ended(self, running: Sequence[_Running]) -> list[_Running]:
        ready = connection.wait([one.receiver for one in running])
        return [one for one in running if one.receiver in ready]

    def outcome(self, one: _Running) -> Outcome:
        """The outcome that the process of a cell sent, or how the process ended without one."""
        try:
            origin = f"the process of {one.cell.label}"
            outcome = Outcome.from_json(json.loads(one.receiver.recv_bytes()), origin)
        except (EOFError, OSError, ValueError, InputError):
            outcome = None
        one.receiver.close()
        one.process.join()
        seconds = time.perf_counter() - one.begun
        return outcome or Outcome("failed", _ending(one.process.exitcode), seconds=seconds)

    def close(self, running: Sequence[_Running]) -> None:
        for one in running:
            one.process.kill()
            one.process.join()


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"the process of the cell ended with status {exitcode} and no answer"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = ": the host's memory may have run out" if name == "SIGKILL" else ""
    return f"the process of the cell was ended by {name}{hint}"
