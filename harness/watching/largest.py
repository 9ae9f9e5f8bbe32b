"""Finds the largest value in a command, such as a batch size, with which it does not run out of memory."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.errors import InputError
from harness.step_profile import StepProfile
from harness.virtual_gpu import Options
from harness.watching.launch import run_watched

OUTPUT = "output.txt"
"""The file in a try's folder that holds what the command printed."""
_SHORTAGE = re.compile(
    rb"OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory"
)
MOST_GUESSES = 4
"""How many values are tried because the device is expected to be full there. Then the search doubles and
halves."""
MOST_OF_OUTPUT = 2**24
"""How many bytes of the output's end are searched for an out-of-memory from before the first step."""


class Values(NamedTuple):
    """The values from `least` to `most`, which stand in the environment variable `name`, or in the command in
    the place of {name} or {}."""

    name: str
    least: int
    most: int


class Try(NamedTuple):
    """One run of the command, with one value."""

    value: int
    profile: StepProfile | None
    """The run's profile; None where no step began."""
    fits: bool
    folder: Path
    step_s: float | None = None
    """Median seconds of a step, measured or on a virtual GPU estimated; None where no step was timed."""


def parse_values(text: str) -> Values:
    """The values in a text such as BS=1..64. Raises InputError for any other text."""
    match = re.fullmatch(r"([A-Za-z_]\w*)=(\d{1,9})\.\.(\d{1,9})", text, re.ASCII)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        raise InputError(
            f"--fit {text}: give a name and the values it may have, as in --fit BS=1..64. The name is that "
            "of an environment variable which the program reads, or stands as {BS} in the command."
        )
    return Values(match[1], int(match[2]), int(match[3]))


def with_value(command: Sequence[str], values: Values, value: int) -> tuple[list[str], dict[str, str]]:
    """The command with this value, and the environment variable that holds it where the command does not."""
    for place in (f"{{{values.name}}}", "{}"):
        if any(place in word for word in command):
            return [word.replace(place, str(value)) for word in command], {}
    return list(command), {values.name: str(value)}


def largest_that_fits(
    values: Values, fits: Callable[[int], bool], expected: Callable[[], int | None] = lambda: None
) -> int | None:
    """The largest value for which `fits` is true, by doubling and then bisection; None where there is none.
    The first MOST_GUESSES values after the least are those that are `expected` to be the largest, if any is.

    It assumes that every value below one that fits, fits too.
    """
    known, too_large, value = 0, values.most + 1, values.least
    guesses = 0
    while True:
        if fits(value):
            known = value
        else:
            too_large = value
        if not known or too_large - known == 1:
            return known or None
        guess = expected() if guesses < MOST_GUESSES else None
        if guess is not None:
            guesses += 1
            value = min(max(guess, known + 1), too_large - 1)
        else:
            value = min(2 * known, values.most) if too_large > values.most else (known + too_large) // 2


def expected_largest(tries: Sequence["Try"], earlier: Sequence["Try"]) -> int | None:
    """The value at which the device is full if what the process takes of it grows in proportion, seen by the
    two largest values that fit; by those of an `earlier` device where this one has a single one. None where
    that is not known."""
    here, before = _taken(tries), _taken(earlier)
    pair = (here if len(here) > 1 else before)[-2:]
    device_bytes = next((t.profile.hardware.memory_bytes for t in tries if t.profile is not None), None)
    if not here or len(pair) < 2 or device_bytes is None:
        return None
    (least, few), (most, many) = pair
    each = (many - few) / (most - least)
    value, taken = here[-1]
    return value + int((device_bytes - taken) / each) if each > 0 else None


def _taken(tries: Sequence["Try"]) -> list[tuple[int, int]]:
    """Each value that fits, with the bytes of the device that the process then takes."""
    fitting = sorted((t.value, t.profile.memory.process_bytes) for t in tries if t.fits and t.profile)
    return [(value, taken) for value, taken in fitting if taken is not None]


def tried(
    command: Sequence[str],
    environment: Mapping[str, str],
    value: int,
    steps: tuple[int, int],
    folder: Path,
    gpus: Options | None,
) -> Try:
    """Run the command once, watched, with `value` in `folder`. Raises InputError if it ends neither well nor
    out of memory, and where `run_watched` does.
    """
    output = folder / OUTPUT
    status = run_watched(command, steps, folder, gpus, environment=environment, output=output)
    path = folder / "profile.json"
    profile = StepProfile.read(path) if path.is_file() else None
    ran_out = profile is not None and profile.oom is not None
    if status and not ran_out:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - MOST_OF_OUTPUT))
            ran_out = _SHORTAGE.search(file.read()) is not None
    if not ran_out and (status != 0 or profile is None):
        how = f"the command ended with status {status}" if status else "no step of a training was found"
        raise InputError(f"with {value} {how}, and not out of memory. What it printed is in {output}.")
    return Try(value, profile, not ran_out, folder, profile and profile.step.time_s.median)
