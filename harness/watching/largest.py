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


def largest_that_fits(values: Values, fits: Callable[[int], bool]) -> int | None:
    """The largest value for which `fits` is true, by doubling and then bisection; None where there is none.

    It assumes that every value below one that fits, fits too.
    """
    known, value = None, values.least
    while fits(value):
        known = value
        if value == values.most:
            return known
        value = min(2 * value, values.most)
    if known is None:
        return None
    too_large = value
    while too_large - known > 1:
        middle = (known + too_large) // 2
        if fits(middle):
            known = middle
        else:
            too_large = middle
    return known


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
    ran_out = (profile is not None and profile.oom is not None) or (
        status != 0 and _SHORTAGE.search(_end_of(output)) is not None
    )
    if not ran_out and (status != 0 or profile is None):
        how = f"the command ended with status {status}" if status else "no step of a training was found"
        raise InputError(f"with {value} {how}, and not out of memory. What it printed is in {output}.")
    return Try(value, profile, not ran_out, folder, profile and profile.step.time_s.median)


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_OF_OUTPUT))
        return file.read()
