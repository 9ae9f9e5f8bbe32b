"""The progress of a run, and of what takes a while."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.cli.terminal.terminal import Bar, say
from harness.units import in_gib


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

    def __init__(self, console: Console, total: int) -> None:
        text = TextColumn("{task.fields[text]}")
        columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), text)
        super().__init__(console, total, "setup", *columns, TimeRemainingColumn(), text="")

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
        text = "  ".join(parts)
        if self._bar is not None:
            self._bar.update(self._task, completed=index + 1, description=kind, text=text)
        else:
            say(self._console, f"step {index + 1}/{total} {kind}  {text}")
