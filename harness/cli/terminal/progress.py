"""The progress of a run, and of anything else that takes a while."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness.cli.terminal.terminal import Bar, say
from harness.units import duration, in_gib


class Waiting(Bar):
    """Shows on a terminal what is being done and for how long; nothing elsewhere."""

    def __init__(self, console: Console, what: str) -> None:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        super().__init__(console, 1, what, *columns)

    def now(self, what: str) -> None:
        """Show that `what` is being done from now on."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)


class RunProgress(Bar):
    """Shows a run's progress: by a bar on a terminal, and by one line for each step elsewhere."""

    def __init__(self, console: Console, total: int, step_s: float | None = None) -> None:
        """`total` is the number of steps, and `step_s` the least seconds that a step will take, for the time
        left until the first step is done."""
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
        """Show that the step `index`, counted from 0, is done."""
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
        """The time that is left for `steps` steps, by the steps since the first, which is a slow one."""
        now = time.monotonic()
        if self._begun is None:
            self._begun = now
            return ""
        self._done += 1
        seconds = (now - self._begun) / self._done * steps
        return left_in_words(seconds) if seconds >= WORTH_SAYING_S else ""


WORTH_SAYING_S = 10
"""Less time left than this, in seconds, is not shown."""


def left_in_words(seconds: float) -> str:
    return f"about {duration(seconds)} left"
