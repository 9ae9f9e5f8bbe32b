"""`harness watch` with --fit or several virtual GPUs: a table of what happened when the command was tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from harness.cli.exit_status import OUT_OF_MEMORY
from harness.cli.terminal.terminal import print_table, rows_table, say
from harness.errors import InputError
from harness.step_profile import StepProfile, higher_than_steps, verdict
from harness.units import in_gib, ms

if TYPE_CHECKING:
    from harness.virtual_gpu import Options
    from harness.watching import Try, Values


def watch_and_fit(
    people: Console,
    command: Sequence[str],
    steps: tuple[int, int],
    folder: Path,
    devices: Sequence[Options | None],
    values: Values | None,
) -> int:
    """Try the command on every device, as it is or with values of a range, and print what fits. Returns the
    exit status, which is 3 where a device has too little memory for all that was tried.
    """

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--out {folder}: it is not empty. Give a new folder.")
    from harness.watching import expected_largest, largest_that_fits, tried, with_value

    def tries(name: str, place: Path, options: Options | None, earlier: Sequence[Try]) -> list[Try]:
        """What was tried on one device, in the order of the values, after what was tried on an `earlier` one;
        one try where there are no values."""
        if (some := values) is None:
            return [tried(command, {}, 1, steps, place, options)]
        found: list[Try] = []

        def fits(value: int) -> bool:
            words, variables = with_value(command, some, value)
            attempt = tried(words, variables, value, steps, place / f"{some.name}-{value}", options)
            found.append(attempt)
            say(people, f"{name}, {some.name}={value}: {'fits' if attempt.fits else 'runs out of memory'}")
            return attempt.fits

        largest_that_fits(some, fits, lambda: expected_largest(found, earlier))
        return sorted(found, key=lambda attempt: attempt.value)

    sentences: list[str] = []
    status = 0
    found: list[Try] = []
    for options in devices:
        name = "this machine" if options is None else options.gpu
        found = tries(name, folder if options is None else folder / name, options, found)
        print_table(people, _table(name, found, values))
        largest = max((attempt.value for attempt in found if attempt.fits), default=None)
        status = status if largest is not None else OUT_OF_MEMORY
        sentences.append(_sentence(name, found, values, largest))
    for sentence in sentences:
        say(people, sentence)
    say(people, f"run folders: {folder}", whole=True)
    return status


def _table(name: str, found: Sequence[Try], values: Values | None) -> Table:
    times = any(attempt.step_s is not None for attempt in found)
    first = [] if values is None else [values.name]
    headings = [*first, "", "peak", "in", "reserved", "of the device", *(["step, ms"] if times else [])]
    rows: list[list[str]] = []
    for attempt in found:
        row = [] if values is None else [str(attempt.value)]
        row += ["fits" if attempt.fits else "runs out"]
        peak, phase, reserved = _highest(attempt.profile)
        on_device = None if attempt.profile is None else attempt.profile.memory.process_bytes
        row += [in_gib(peak), phase, in_gib(reserved), in_gib(on_device)]
        rows.append([*row, *([] if not times else ["-" if attempt.step_s is None else ms(attempt.step_s)])])
    table = rows_table(headings, rows, left=(len(first), len(first) + 2))
    table.title = name
    return table


def _highest(profile: StepProfile | None) -> tuple[int | None, str, int | None]:
    """The highest peak of a program, in its steps or between them: the allocated bytes, the phase, and the
    peak of reserved bytes there."""
    if profile is None:
        return None, "", None
    memory, apart = profile.memory, higher_than_steps(profile)
    if not apart:
        return memory.peak_allocated_bytes, memory.peak_phase or "", memory.peak_reserved_bytes
    phase = max(apart, key=apart.__getitem__)
    stats = profile.phases.get(phase)  # the beginning of a program is no phase of the profile
    return apart[phase], phase, stats and stats.peak_reserved_bytes


def _sentence(name: str, found: Sequence[Try], values: Values | None, largest: int | None) -> str:
    """What was found on one device, in words."""
    best = next((attempt for attempt in found if attempt.value == largest), None)
    if values is None:
        profile = found[0].profile
        return f"{name}: {verdict(profile) if profile else 'memory runs out before the first step'}"
    if best is None:
        return f"{name}: not even {values.name}={values.least} fits"
    reason = "" if best.profile is None else f": {verdict(best.profile)}"
    text = f"{name}: the largest {values.name} is {largest}{reason}"
    if largest == values.most:
        peaks = {_highest(attempt.profile)[0] for attempt in found}
        if len(peaks) == 1 < len(found):
            text += f". The peak is the same with every {values.name}: does the command read it?"
        return f"{text}, and no larger one was to be tried" if len(peaks) > 1 else text
    beyond = next((attempt for attempt in found if attempt.value == best.value + 1), None)
    if beyond is not None and beyond.profile is not None and beyond.profile.oom is not None:
        oom = beyond.profile.oom
        request = "" if oom.requested_bytes is None else f", asking for {in_gib(oom.requested_bytes)}"
        text += f". {beyond.value} runs out in {oom.phase}{request}"
    return text
