"""What people read in the terminal: the progress of a run and the tables of a profile."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from harness.errors import printable
from harness.step_profile import CATEGORIES, PHASES, StepProfile, TimeStats

WIDEST = 1000
"""Characters of a line; more than any table here needs."""
KINDS = {
    "cuda_allocator": "the CUDA allocator's counters",
    "simulated_allocator": "a model of the CUDA allocator",
    "live_tensors": "the bytes of live CPU tensors (there is no CUDA allocator here)",
    "closed_form": "arithmetic",
}


class Terminal(Console):
    """A console that shows what files say and obeys none of it: no escape sequence, markup or emoji code.

    rich turns every string that it prints, also in a table, into text by `render_str`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """See rich.console.Console."""
        return super().render_str(printable(text), **options)


@cache
def warn_of_trusted_code(model: str) -> None:
    """Say, once and in red, that the Python code of `model` may run."""
    text = f"trust_remote_code: the Python code that comes with {model} may run, with all that you may do."
    Terminal(stderr=True).print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)


class Bar:
    """A bar on a terminal for `total` pieces of work, and no bar elsewhere; shown between enter and exit."""

    def __init__(
        self, console: Console, total: int, description: str, *columns: ProgressColumn, **fields: Any
    ) -> None:
        """`fields` are what the columns show at first, by the names they use."""
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(description, total=total, **fields)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


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
        loss: float,
        tokens_per_s: float | None,
        peak_bytes: int | None,
    ) -> None:
        """A step is done."""
        text = f"loss {loss:.4f}"
        if tokens_per_s is not None:
            text += f"  {tokens_per_s:,.0f} tokens/s"
        if peak_bytes is not None:
            text += f"  peak {in_gib(peak_bytes)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=index + 1, description=kind, text=text)
        else:
            _plain(self._console, f"step {index + 1}/{total} {kind}  {text}")


def print_profile(console: Console, profile: StepProfile) -> None:
    """The tables of one profile: phases, then memory at the peak by category, then one line a fact."""
    table = _phase_table(profile, tight=console.width < 90)
    if len(table.columns) > 1:
        _plain(console, f"{profile.source}: one step by phase")
        print_table(console, table)
    if profile.memory.at_peak.total_bytes():
        _plain(console, f"memory at the peak, in {profile.memory.peak_phase}")
        print_table(console, _memory_table(profile))
    for line in _facts(profile):
        _plain(console, line)


def print_table(console: Console, table: Table) -> None:
    """The table at its full width: in a narrow terminal its lines wrap, and no number is cut."""
    options = console.options.update(max_width=WIDEST)
    table.width = console.measure(table, options=options).maximum
    console.print(table, crop=False)


def in_gib(size_bytes: int | None) -> str:
    """Bytes for reading: GiB, below a tenth of one MiB, below a tenth of that KiB; a dash for unknown."""
    if size_bytes is None:
        return "-"
    if abs(size_bytes) < 2**20 / 10:
        return f"{size_bytes / 2**10:,.1f} KiB"
    if abs(size_bytes) < 2**30 / 10:
        return f"{size_bytes / 2**20:,.1f} MiB"
    return f"{size_bytes / 2**30:,.2f} GiB"


def in_ms(seconds: float | None) -> str:
    """Seconds for reading, in ms; a dash for unknown."""
    return "-" if seconds is None else f"{_ms(seconds)} ms"


def _phase_table(profile: StepProfile, *, tight: bool) -> Table:
    """Fits 80 columns when `tight`; a column that nothing is known for is left out."""
    step, memory = profile.step.time_s, profile.memory
    total = sum(stats.time_s.median or 0 for stats in profile.phases.values())
    rows = [
        (
            name,
            _median(stats.time_s),
            _range(stats.time_s),
            f"{(stats.time_s.median or 0) / total:.0%}" if total else "-",
            in_gib(stats.peak_allocated_bytes),
            in_gib(stats.peak_reserved_bytes),
            in_gib(stats.allocated_at_end_bytes),
        )
        for name in PHASES
        if (stats := profile.phases.get(name)) is not None
    ]
    headings = ("phase", "time, ms", "p10 - p90", "share", "peak", "reserved", "at end")
    known = [i for i in range(len(headings)) if any(row[i] != "-" for row in rows)]
    peaks = (in_gib(memory.peak_allocated_bytes), in_gib(memory.peak_reserved_bytes))
    rows.append(("step", _median(step), _range(step), "", *peaks, ""))
    table = _table(0 if tight else 1)
    for i in known:
        table.add_column(headings[i], justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in known), style="bold" if row[0] == "step" else "")
    return table


def _memory_table(profile: StepProfile) -> Table:
    memory = profile.memory
    table = _table()
    table.add_column("category")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    total = memory.at_peak.total_bytes()
    for name in CATEGORIES:
        size = getattr(memory.at_peak, f"{name}_bytes")
        if size:
            table.add_row(name, in_gib(size), f"{size / total:.1%}")
    table.add_row("peak", in_gib(total), "", style="bold")
    return table


def _table(padding: int = 1) -> Table:
    return Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, padding))


def _facts(profile: StepProfile) -> list[str]:
    memory, step = profile.memory, profile.step
    lines = [f"device: {profile.hardware.name}; memory is {KINDS[memory.kind]}"]
    apart = [
        ("setup peak", memory.setup_peak_allocated_bytes),
        ("first step peak", memory.first_step_peak_allocated_bytes),
        ("process on the device", memory.process_bytes),
        ("offloaded to the host", memory.host_bytes),
        ("process on the host", step.host_rss_bytes),
    ]
    lines.append("; ".join(f"{name} {in_gib(size)}" for name, size in apart if size is not None))
    if step.tokens_per_s is not None:
        mfu = "" if step.mfu is None else f", MFU {step.mfu:.1%}"
        lines.append(f"{step.tokens_per_s:,.0f} tokens/s{mfu}")
    if step.loss:
        first, last = _loss(step.loss[0]), _loss(step.loss[-1])
        lines.append(f"loss {first} -> {last} over {len(step.loss)} steps")
    if profile.not_finite is not None:
        lines.append(f"steps with a loss or weights not finite: {profile.not_finite.num_steps}")
    lines += [f"warning: {warning}" for warning in profile.warnings]
    return [line for line in lines if line]


def _loss(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def _median(time_s: TimeStats) -> str:
    return "-" if time_s.median is None else _ms(time_s.median)


def _range(time_s: TimeStats) -> str:
    if time_s.p10 is None or time_s.p90 is None:
        return "-"
    return f"{_ms(time_s.p10)} - {_ms(time_s.p90)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _plain(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
