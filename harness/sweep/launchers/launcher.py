"""The seam between a sweep and who answers its cells, and the loop over it. Imports no torch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from harness.errors import InputError
from harness.sweep.cell import Outcome
from harness.sweep.plan import Cell, Kind

TRIES = 3
"""How often a cell is asked whose answer is lost. What crashes every time is the cell's own fault."""


@dataclass(frozen=True)
class Question:
    """A cell that is asked about."""

    key: str
    """Of its file in the sweep's folder."""
    cell: Cell
    kind: Kind
    device: str | None
    """For a measurement."""


@dataclass(frozen=True)
class Lost:
    """What an engine says of a cell that ended without an answer: killed, or its machine gone."""

    reason: str


class Launcher(Protocol):
    """Starts cells, each in a process of its own. What `start` returns stands for one that is at work."""

    def start(self, question: Question) -> Any:
        """Raises InputError when it cannot be started."""
        ...

    def ended(self, running: Sequence[Any]) -> Sequence[Any]:
        """Wait until one or more of `running` have ended, and return those."""
        ...

    def outcome(self, one: Any) -> Outcome | Lost:
        """How one that has ended did."""
        ...

    def close(self, running: Sequence[Any]) -> None:
        """End those that are at work still. Nothing is started after that."""
        ...


class RemoteLauncher(Launcher, Protocol):
    """A launcher that starts cells on machines other than this one, or may."""

    machine: dict[str, Any]
    """What a measurement is asked of; a cell that was measured on another is another cell."""
    at_once: int
    """How many cells are at work at the same time unless the user says otherwise."""


def outcomes(
    launcher: Launcher, questions: Iterable[Question], at_once: int, tell: Callable[[str], None]
) -> Iterator[tuple[Question, Outcome]]:
    """Every question with its outcome as it is known; `at_once` are at work at the same time.

    A cell that was lost is asked again, TRIES times in all; `tell` hears of it in a sentence. An engine that
    takes no more cells while some are at work is asked for fewer. Closing the iterator ends them.
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
