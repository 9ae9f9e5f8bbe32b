"""What a run has written so far: the end of its log.jsonl, and how many steps its recipe has.

Imports no torch. Anybody may have written the files: a line that is not about a step is left out.
"""

import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.run_folder import read_command
from harness.system import is_object, parse_json, read_mapping

TAIL_BYTES = 2**19
"""How many bytes are read from the end of a log: about two thousand steps."""
LONGEST_LINE_VALUES = 100
"""The most values that a line of the log may hold."""


@dataclass(frozen=True)
class LoggedStep:
    """A line of the log. What it does not say is None."""

    step: int
    """The number of the step, counted from 0."""
    kind: str
    """Which of the run's steps it is: warmup, timed or recorded."""
    loss: float | None
    step_s: float | None
    tokens_per_s: float | None
    peak_bytes: int | None
    """The most that was allocated up to this step."""


@dataclass(frozen=True)
class Log:
    """The steps of a run so far; only the last ones when there are many."""

    model: str
    """The recipe's model, or the command of a run that is not of a recipe."""
    num_steps: int | None
    """The warmup and timed steps of the recipe, after which some are recorded; None where it is not known."""
    steps: list[LoggedStep]
    loss: float | None
    """The last loss that is finite."""
    step_s: float | None
    """The time of the last timed step."""
    tokens_per_s: float | None
    """The speed of the last timed step."""
    peak_bytes: int | None
    """The most that has been allocated so far."""

    def in_words(self) -> str:
        """How far the run is, and its loss, as in "step 3 of 8, loss 1.2345"."""
        if not self.steps:
            return "no step yet"
        total = "" if self.num_steps is None else f" of {self.num_steps}"
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        last = self.steps[-1]
        done = last.kind if last.kind == "recorded" else f"step {last.step + 1}{total}"
        return f"{done}{loss}"


def read_log(folder: Path) -> Log:
    """The log of the run in `folder`. Raises InputError if it or the recipe cannot be read."""
    model, num_steps = _model_and_steps(folder)
    try:
        lines = _tail(folder / "log.jsonl").splitlines()
    except OSError as error:
        raise InputError(f"cannot read {folder / 'log.jsonl'}: {error.strerror}.") from None
    steps = [step for line in lines if (step := _step(line)) is not None]

    def last(name: str) -> Any:
        """The value of the last step that has one."""
        known = (getattr(step, name) for step in reversed(steps))
        return next((value for value in known if value is not None), None)

    return Log(model, num_steps, steps, *map(last, ("loss", "step_s", "tokens_per_s", "peak_bytes")))


def _model_and_steps(folder: Path) -> tuple[str, int | None]:
    """`model` and `num_steps` of the Log of the run in `folder`, from its recipe or its command."""
    if not os.path.lexists(folder / "recipe.yaml"):
        return " ".join(read_command(folder)), None
    recipe = read_mapping(folder / "recipe.yaml", "recipe")
    counts = [recipe.get(name) for name in ("warmup_steps", "steps")]
    whole = [count for count in counts if type(count) is int]
    num_steps = sum(whole) if len(whole) == len(counts) else None
    return str(recipe.get("model", "-")), num_steps


def _tail(path: Path) -> bytes:
    """The whole lines within the last TAIL_BYTES of a file. Raises OSError for a link and for no file."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(0, "it is not a regular file")
        file.seek(max(0, status.st_size - TAIL_BYTES))
        tail = file.read(TAIL_BYTES)
    # the first line may be cut off at its beginning, and the last may still be being written
    is_all = status.st_size <= TAIL_BYTES
    return tail[0 if is_all else tail.find(b"\n") + 1 : tail.rfind(b"\n") + 1]


def _step(line: bytes) -> LoggedStep | None:
    """The step of a line of the log; None for a line that is not about a step."""
    try:
        fields = parse_json(line, LONGEST_LINE_VALUES)
    except (ValueError, RecursionError):
        return None
    if not is_object(fields) or type(fields.get("step")) is not int:
        return None

    def number(name: str) -> float | None:
        value = fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return None
        return float(value)

    peak, seconds, tokens = fields.get("peak_allocated_bytes"), number("step_s"), number("num_tokens")
    return LoggedStep(
        step=fields["step"],
        kind=str(fields.get("kind", "-"))[:20],
        loss=number("loss"),
        step_s=seconds,
        tokens_per_s=tokens / seconds if tokens and seconds and seconds > 0 else None,
        peak_bytes=peak if type(peak) is int and peak >= 0 else None,
    )
