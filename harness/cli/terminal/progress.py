"""The progress of a run, and of what takes a while."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness.cli.terminal.terminal import Bar, say
from harness.units import duration, in_gib


class Waiting(Bar):
    """What is going on and for how long, on a terminal; nothing elsewhere."""

    def __init__(self, console: Console, what: str) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        super().__init__(console, 1, what, *columns)

    def now(self, what: str) -> None:
        """Say what is going on now."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)


class RunProgress(Bar):
    """A bar on a terminal, one plain line a step elsewhere."""

    def __init__(self, console: Console, total: int, step_s: float | None = None) -> None:
        """`step_s`: what a step will take at least, until one has been seen."""
        text, left = TextColumn("{task.fields[text]}"), TextColumn("{task.fields[left]}")
        columns = (
            TextColumn("{task.description}"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        at_least = "" if step_s is None else f"at least {duration(total * step_s)} left"
        super().__init__(console, total, "setup", *columns, left, text, text="", left=at_least)
        self._begun: float | None = None
        self._done = 0

    def step(
        self,
        index: int,
        total: int,
        kind: str,
        loss: float | None,
        tokens_per_s: float | None,
        peak_bytes: int | None,
    ) -> None:
        """A step is done."""
        parts = [] if loss is None else [f"loss {loss:.4f}"]
        if tokens_per_s is not None:
            parts.append(f"{tokens_per_s:,.0f} tokens/s")
        if peak_bytes is not None:
            parts.append(f"peak {in_gib(peak_bytes)}")
        text, left = "  ".join(parts), self._left(total - index - 1)
        if self._bar is not None:
            self._bar.update(self._task, completed=index + 1, description=kind, text=text, left=left)
        else:
            say(self._console, "  ".join(filter(None, (f"step {index + 1}/{total} {kind}", text, left))))

    def _left(self, steps: int) -> str:
        """From the steps since the first, which is slower than the others."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
            return ""
        self._done += 1
        seconds = (now - self._begun) / self._done * steps
        return left_in_words(seconds) if seconds >= WORTH_SAYING_S else ""


WORTH_SAYING_S = 10


def left_in_words(seconds: float) -> str:
    return f"about {duration(seconds)} left"
