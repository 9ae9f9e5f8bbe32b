"""`harness watch --fit BS=1..64`, and a program on several virtual GPUs: a table of tries."""

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
    """Try the command on every device, with the values of a range or as it is. Returns the exit status: 3
    where a device holds none of them.
    """

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"--out {folder}: it is not empty. Give a new folder.")
    sentences: list[str] = []
    status = 0
    found: list[Try] = []
    for options in devices:
        name = "this machine" if options is None else options.gpu
        place = folder if options is None else folder / name
        found = _tries(people, command, steps, place, options, values, name, found)
        print_table(people, _table(name, found, values))
        largest = max((one.value for one in found if one.fits), default=None)
        status = status if largest is not None else OUT_OF_MEMORY
        sentences.append(_sentence(name, found, values, largest))
    for sentence in sentences:
        say(people, sentence)
    say(people, f"run folders: {folder}", whole=True)
    return status


def _tries(
    people: Console,
    command: Sequence[str],
    steps: tuple[int, int],
    folder: Path,
    options: Options | None,
    values: Values | None,
    name: str,
    earlier: Sequence[Try],
) -> list[Try]:
    """The tries on one device, after those on an `earlier` one."""
    from harness.watching import expected_largest, largest_that_fits, tried, with_value

    if values is None:
        return [tried(command, {}, 1, steps, folder, options)]
    found: list[Try] = []

    def fits(value: int) -> bool:
        words, variables = with_value(command, values, value)
        one = tried(words, variables, value, steps, folder / f"{values.name}-{value}", options)
        found.append(one)
        say(people, f"{name}, {values.name}={value}: {'fits' if one.fits else 'runs out of memory'}")
        return one.fits

    largest_that_fits(values, fits, lambda: expected_largest(found, earlier))
    return sorted(found, key=lambda one: one.value)


def _table(name: str, found: Sequence[Try], values: Values | None) -> Table:

    times = any(one.step_s is not None for one in found)
    first = [] if values is None else [values.name]
    headings = [*first, "", "peak", "in", "reserved", "of the device", *(["step, ms"] if times else [])]
    rows: list[list[str]] = []
    for one in found:
        row = [] if values is None else [str(one.value)]
        row += ["fits" if one.fits else "runs out"]
        peak, phase, reserved = _highest(one.profile)
        on_device = None if one.profile is None else one.profile.memory.process_bytes
        row += [in_gib(peak), phase, in_gib(reserved), in_gib(on_device)]
        rows.append([*row, *([] if not times else ["-" if one.step_s is None else ms(one.step_s)])])
    table = rows_table(headings, rows, left=(len(first), len(first) + 2))
    table.title = name
    return table


def _highest(profile: StepProfile | None) -> tuple[int | None, str, int | None]:
    """Where the program takes the most, in its steps or beside them: bytes allocated, the phase, bytes
    reserved then."""

    if profile is None:
        return None, "", None
    memory, apart = profile.memory, higher_than_steps(profile)
    if not apart:
        return memory.peak_allocated_bytes, memory.peak_phase or "", memory.peak_reserved_bytes
    phase = max(apart, key=apart.__getitem__)
    beside = profile.phases.get(phase)  # none of a program's beginning
    return apart[phase], phase, beside and beside.peak_reserved_bytes


def _sentence(name: str, found: Sequence[Try], values: Values | None, largest: int | None) -> str:

    best = next((one for one in found if one.value == largest), None)
    if values is None:
        profile = found[0].profile
        return f"{name}: {verdict(profile) if profile else 'memory runs out before the first step'}"
    if best is None:
        return f"{name}: not even {values.name}={values.least} fits"
    said = "" if best.profile is None else f": {verdict(best.profile)}"
    text = f"{name}: the largest {values.name} is {largest}{said}"
    if largest == values.most:
        peaks = {_highest(one.profile)[0] for one in found}
        if len(peaks) == 1 < len(found):
            text += f". The peak is the same with every {values.name}: does the command read it?"
        return f"{text}, and no larger one was to be tried" if len(peaks) > 1 else text
    beyond = next((one for one in found if one.value == best.value + 1), None)
    if beyond is not None and beyond.profile is not None and beyond.profile.oom is not None:
        oom = beyond.profile.oom
        asked = "" if oom.requested_bytes is None else f", asking for {in_gib(oom.requested_bytes)}"
        text += f". {beyond.value} runs out in {oom.phase}{asked}"
    return text
