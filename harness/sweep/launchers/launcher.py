"""The interface between a sweep and what answers its cells, and the loop over it. Imports no torch."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.errors import InputError
from harness.sweep.cell import Outcome
from harness.sweep.plan import Cell, Kind

TRIES = 3
"""How often a cell is started whose answer is lost. If it always is, the fault is the cell's own."""


@dataclass(frozen=True)
class Question:
    """What is asked of a launcher: one cell."""

    key: str
    """The `cell_key` of the cell, which names its file in the sweep's folder."""
    cell: Cell
    kind: Kind
    device: str | None
    """The device of a measurement; None for one that is chosen, and for predictions."""


@dataclass(frozen=True)
class Lost:
    """The end of a cell without an answer, which was killed or lost its machine."""

    reason: str


class Launcher(Protocol):
    """Starts cells, each in a process of its own. What `start` returns stands for a running cell."""

    def start(self, question: Question) -> Any:
        """Start a cell. Raises InputError when it cannot be started."""
        ...

    def ended(self, running: Sequence[Any]) -> Sequence[Any]:
        """Wait until one or more of the `running` cells have ended, and return those."""
        ...

    def outcome(self, one: Any) -> Outcome | Lost:
        """The outcome of `one` cell that has ended."""
        ...

    def close(self, running: Sequence[Any]) -> None:
        """End the cells that are still running. Nothing is started after that."""
        ...


class RemoteLauncher(Launcher, Protocol):
    """A launcher that may start cells on other machines."""

    machine: dict[str, Any]
    """Describes where cells are measured, and is a part of a measured cell's key."""
    at_once: int
    """How many cells run at the same time unless the user says otherwise."""


def outcomes(
    launcher: Launcher, questions: Iterable[Question], at_once: int, tell: Callable[[str], None]
) -> Generator[tuple[Question, Outcome]]:
    """Every question with its outcome, as soon as that is known; `at_once` cells run at the same time.

    A cell that was lost is started again, TRIES times in all, and `tell` is called with a sentence about it.
    An engine that takes no more cells while some are running is given fewer. Closing the iterator ends them.
    """
    waiting = deque((question, 1) for question in questions)
    running: list[tuple[Any, Question, int]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                question, attempt = waiting[0]
                try:
                    running.append((launcher.start(question), question, attempt))
                except InputError as error:
                    if not running:
                        raise
                    at_once = len(running)
                    tell(f"{error} {at_once} cells are at work at the same time from now on.")
                    break
                waiting.popleft()
            ended = launcher.ended([one for one, _, _ in running])
            for one, question, attempt in [entry for entry in running if entry[0] in ended]:
                running = [entry for entry in running if entry[0] is not one]
                outcome = launcher.outcome(one)
                if isinstance(outcome, Outcome):
                    yield question, outcome
                elif attempt < TRIES:
                    tell(f"{question.cell.label}: {outcome.reason}. It is asked again.")
                    waiting.append((question, attempt + 1))
                else:
                    yield question, Outcome("failed", f"asked {TRIES} times: {outcome.reason}")
    finally:
        launcher.close([one for one, _, _ in running])
