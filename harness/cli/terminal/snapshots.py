"""What `harness snapshot` shows of memory snapshots in the terminal. Imports no torch."""

from collections.abc import Sequence

from rich.console import Console

from harness.cli.terminal.terminal import print_table, rows_table, say
from harness.report import Section, Table
from harness.snapshot import FEWEST_ENDS, HeldDiff, Leaks
from harness.units import counted, in_gib

MOST_ROWS = 12
"""The most rows of a table that are shown; the report has all of them."""
MOST_FRAMES = 8
"""The most frames of a stack that are shown, innermost first."""


def print_snapshot(console: Console, section: Section) -> None:
    """Print the first sentences, the code that asked when memory ran out, and tables of what is allocated."""
    for sentence in section.answer:
        say(console, sentence)
    if "asked_at" in section.words:
        say(console, "asked for at:")
        _print_stack(console, section.words["asked_at"].splitlines())
    for name in ("groups", "kinds", "segments"):
        if name in section.tables:
            _print_table(console, section.tables[name])
    for line in section.missing:
        say(console, f"note: {line}")


def print_held_diff(console: Console, diff: HeldDiff, names: tuple[str, str]) -> None:
    """Print the totals, the categories, and then the largest changes with their stacks."""
    say(console, f"{in_gib(diff.before_bytes)} held in {names[0]}")
    say(
        console,
        f"{in_gib(diff.after_bytes)} held in {names[1]}: {_signed(diff.after_bytes - diff.before_bytes)}",
    )
    rows = [
        (name, in_gib(before), in_gib(after), _signed(after - before))
        for name, (before, after) in diff.by_category().items()
    ]
    print_table(console, rows_table(("category", "before", "after", "change"), rows, wraps=range(4)))
    changed = [change for change in diff.changes if change.kind != "same"]
    if not changed:
        say(console, "Every stack holds as much in both.")
    for kind in ("new", "gone", "grown", "shrunk"):
        of_kind = diff.of_kind(kind)
        if of_kind:
            total = sum(change.bytes for change in of_kind)
            say(console, f"{kind}: {counted(len(of_kind), 'stack')}, {_signed(total)}")
        for change in of_kind[:MOST_ROWS]:
            category, stack, place = change.holder
            counts = f"{change.before.count:,} -> {change.after.count:,} allocations"
            say(console, f"  {_signed(change.bytes)} of {category} at {place} ({counts})")
            _print_stack(console, stack)


def print_leaks(console: Console, leaks: Leaks) -> None:
    """Print how the steps were found, what is allocated when they end, and what grew."""
    if not leaks.ends:
        say(console, f"No steps were found: {leaks.steps_from}.")
        return
    say(console, f"{counted(len(leaks.ends), 'step')}, found by {leaks.steps_from}.")
    if not leaks.can_tell:
        say(console, f"To see what grows takes {FEWEST_ENDS} steps: record more.")
        return
    first, last = in_gib(leaks.allocated_bytes[0]), in_gib(leaks.allocated_bytes[-1])
    change = leaks.allocated_bytes[-1] - leaks.allocated_bytes[0]
    changed = f", {in_gib(abs(change))} {'more' if change > 0 else 'less'}" if change else ""
    say(console, f"Allocated when they ended: {first} after the first, {last} after the last{changed}.")
    if not leaks.growths:
        say(console, "Nothing grew from step to step.")
        return
    each = in_gib(leaks.grown_bytes // (len(leaks.ends) - 1))
    say(console, f"{counted(len(leaks.growths), 'stack')} grew, by {each} a step in all:")
    for growth in leaks.growths[:MOST_ROWS]:
        category, stack, place = growth.holder
        each = in_gib(growth.total_bytes // (len(leaks.ends) - 1))
        say(console, f"  {each} a step of {category} at {place}: {growth.count:,} allocations at the end")
        _print_stack(console, stack)


def _print_stack(console: Console, stack: Sequence[str]) -> None:
    """Print the Python frames of a stack, or all of them where it has none."""
    python = [line for line in stack if ".py:" in line] or list(stack)
    for line in python[:MOST_FRAMES]:
        say(console, f"      {line}", whole=True)
    if len(python) > MOST_FRAMES:
        say(console, f"      and {len(python) - MOST_FRAMES} more")


WIDE = ("allocated in", "largest")
"""The columns that a terminal of 80 columns has no room for; the report has them."""


def _print_table(console: Console, table: Table) -> None:
    say(console, table.name)
    shown = [n for n, name in enumerate(table.columns) if console.width >= 100 or name not in WIDE]
    left = {place for place, n in enumerate(shown) if not table.numeric(n)}
    rows = [[row[n].shown for n in shown] for row in table.rows[:MOST_ROWS]]
    headings = [table.columns[n] for n in shown]
    print_table(console, rows_table(headings, rows, left=left, wraps=range(len(shown))))
    if len(table.rows) > MOST_ROWS:
        say(console, f"  and {len(table.rows) - MOST_ROWS} more rows: harness report shows them")


def _signed(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else ''}{in_gib(size_bytes)}"
