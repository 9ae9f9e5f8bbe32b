"""Running the cells of a sweep: what is there already is read, the rest is asked for and kept.

A napkin cell is answered here. Every other cell has a process of its own, forked from a server that has
imported the libraries once, so that a crash or the end of the memory is an outcome. Imports no torch.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.sweep.cell import Outcome, answer, answer_in_process
from harness.sweep.folder import KEPT, cell_key, read_outcome, write_outcome
from harness.sweep.plan import Cell, Plan

PRELOADED = [
    "harness.sweep.cell",
    "harness.simulate.simulated_run",
    "harness.measure.measured_run",
    "transformers.modeling_utils",
]


@dataclass(frozen=True)
class Row:
    """A cell that is done."""

    cell: Cell
    outcome: Outcome
    kept: bool = False
    """Whether it was done before and only read."""


def run_cells(plan: Plan, folder: Path, jobs: int = 1, device: str | None = None) -> Iterator[Row]:
    """Every cell of the plan as it is done: first those that were kept, then those that are refused.

    `jobs` cells run at the same time. Closing the iterator ends the processes that are still at work; what
    was yielded has been written. Raises InputError when it cannot be written.
    """
    waiting: list[tuple[str, Cell]] = []
    for cell in plan.cells:
        key = cell_key(cell, plan.kind, device)
        kept = read_outcome(folder, key)
        if kept is not None and kept.status in KEPT:
            yield Row(cell, kept, kept=True)
        elif cell.recipe is None:
            yield _written(folder, key, cell, Outcome("refused", cell.refusal))
        else:
            waiting.append((key, cell))
    if plan.kind == "napkin":
        for key, cell in waiting:
            assert cell.recipe is not None
            yield _written(folder, key, cell, answer("napkin", cell.recipe, cell.hardware))
    elif waiting:
        for key, cell, outcome in _in_processes(waiting, plan, jobs, device):
            yield _written(folder, key, cell, outcome)


def _written(folder: Path, key: str, cell: Cell, outcome: Outcome) -> Row:
    write_outcome(folder, key, cell, outcome)
    return Row(cell, outcome)


@dataclass
class _Running:
    key: str
    cell: Cell
    process: Any
    receiver: Connection
    begun: float


def _in_processes(
    waiting: list[tuple[str, Cell]], plan: Plan, jobs: int, device: str | None
) -> Iterator[tuple[str, Cell, Outcome]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    running: list[_Running] = []
    left = iter(waiting)
    try:
        while True:
            while len(running) < jobs and (following := next(left, None)) is not None:
                running.append(_start(context, *following, plan, device))
            if not running:
                return
            ready = connection.wait([one.receiver for one in running])
            for one in [one for one in running if one.receiver in ready]:
                outcome = _received(one)
                running.remove(one)
                yield one.key, one.cell, outcome
    finally:
        for one in running:
            one.process.kill()
            one.process.join()


def _start(context: Any, key: str, cell: Cell, plan: Plan, device: str | None) -> _Running:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer_in_process, args=(sender, cell, plan.kind, device), daemon=True)
    process.start()
    sender.close()  # the process has its own: when that one closes, the receiver sees the end
    return _Running(key, cell, process, receiver, time.perf_counter())


def _received(one: _Running) -> Outcome:
    """What the process of a cell sent, or what became of it."""
    try:
        outcome = Outcome.from_json(json.loads(one.receiver.recv_bytes()), f"the process of {one.cell.label}")
    except (EOFError, OSError, ValueError, InputError):
        outcome = None
    one.receiver.close()
    one.process.join()
    seconds = time.perf_counter() - one.begun
    return outcome or Outcome("failed", _ending(one.process.exitcode), seconds=seconds)


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"the process of the cell ended with status {exitcode} and no answer"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = ": the host's memory may have run out" if name == "SIGKILL" else ""
    return f"the process of the cell was ended by {name}{hint}"
