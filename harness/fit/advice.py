"""What to say when the memory ran out: where, what filled it, and which changes of the recipe would help.

The changes and their savings are napkin's (fit/search.py), about right; what is called enough was simulated.
So only the commands import this module, and hand `advise` to whoever measures or simulates.
"""

from harness.architecture import load_shape
from harness.errors import InputError
from harness.fit.changes import Change, by_arithmetic, changed, combined, overrides, suggestions
from harness.fit.simulations import Simulations
from harness.hardware import TABLE_NAMES, Hardware, find_hardware, hardware_names, with_memory
from harness.recipe import Recipe
from harness.step_profile import HardwareSummary, OutOfMemoryReport
from harness.units import in_gib

MOST_CHANGES = 5
MOST_SEEN = 3
"""Changes that are simulated at the most."""
MOST_MICRO_BATCHES = 32
"""Of a step: simulating more takes longer than an answer may."""
NOT_ON_WINDOWS = ", not on Windows or WSL"
"""Of unified memory: there the driver does not move it to the host when the device is full (CUDA C++
Programming Guide, unified memory on Windows and WSL)."""
LIKE = "a100-80gb"
"""The device that stands for one that is not in the table."""


def advise(recipe: Recipe, device: HardwareSummary, report: OutOfMemoryReport) -> list[str]:
    """What to change, each with the memory it saves and what it costs in time, the cheapest first.

    First what costs nothing, then changes that leave the result as it is, then others; each group by time.
    Of those beyond MOST_CHANGES only the first that is enough by itself. The figures are napkin's: where it
    cannot tell, a line says why. Of those that are enough by them, the first few are simulated on a device of
    the table until one is seen to fit; of others it is said that they may be enough.
    """
    lines: list[str] = []
    idle = report.reserved_unallocated_bytes or 0
    if report.requested_bytes is not None and idle >= report.requested_bytes:
        lines.append(
            f"PYTORCH_ALLOC_CONF=expandable_segments:True: {in_gib(idle)} are reserved, but in pieces"
        )
    hardware, known = _hardware(device)
    missing = max(1, (report.requested_bytes or 0) - (report.free_bytes or 0))
    try:
        price = by_arithmetic(hardware, load_shape(recipe.model))
        # it ran out: what lay in pieces will lie in pieces again, and what was missing has to be saved
        limit = min(hardware.memory_bytes - idle, price(recipe).required_bytes - missing)
        changes = suggestions(recipe, limit, price)
    except InputError as error:
        return [*lines, f"what a change would save is not known: {error}"]
    if device.kind == "cpu":  # kernels that need a GPU, and a second memory that is not there
        changes = [
            c
            for c in changes
            if not {"loss", "offload", "cpu_offload"} & c.fields.keys() and "paged" not in c.overrides
        ]
    seen = _seen(recipe, hardware, changes) if known else {}
    enough = next((c for c in changes if seen.get(c.overrides, not seen and c.fits)), None)
    listed = changes[:MOST_CHANGES]
    if enough is not None and enough not in listed:
        listed[-1] = enough
    for change in listed:
        time = f", time a token × {change.slowdown:.2f}" if known else ""
        result = "" if change.same_result else ", another training"
        fits = seen.get(change.overrides)
        verdict = ", enough by itself" if fits else ", may be enough" if change.fits and fits is None else ""
        rows = recipe.micro_batch_size - change.fields.get("micro_batch_size", recipe.micro_batch_size)
        result = f" ({in_gib(change.saved_bytes // rows)} a {recipe.unit})" + result if rows else result
        where = NOT_ON_WINDOWS if "paged" in change.overrides else ""
        lines.append(f"{change.overrides}: {in_gib(change.saved_bytes)} less{time}{result}{verdict}{where}")
    if enough is None:
        together = combined(recipe, limit, changes, price)
        size = in_gib(hardware.memory_bytes)
        nothing = (
            f"nothing that the recipe can change is enough for {size}: it takes a device with more memory "
            "(`harness hardware RECIPE`), several (`harness shard RECIPE`) or a smaller model"
        )
        lines.append(f"together {overrides(recipe, together)}, may be enough" if together else nothing)
    return lines


def _seen(recipe: Recipe, hardware: Hardware, changes: list[Change]) -> dict[str, bool]:
    """By overrides, whether a simulation fits: of the first changes that are enough by arithmetic, until one
    does. Empty where nothing can be simulated."""
    simulations, seen = Simulations(hardware), dict[str, bool]()
    for change in [change for change in changes if change.fits][:MOST_SEEN]:
        other = changed(recipe, change.fields)
        if other.gradient_accumulation_steps > MOST_MICRO_BATCHES:
            continue
        try:
            seen[change.overrides] = simulations.profile(other).oom is None
        except InputError:
            continue
        if seen[change.overrides]:
            break
    simulations.keep()
    return seen


def _hardware(device: HardwareSummary) -> tuple[Hardware, bool]:
    """The device of the table that `device` is, and true; or one with as much memory, and false."""
    name = TABLE_NAMES.get(device.name, device.name)
    known = name in hardware_names()
    hardware = find_hardware(name if known else LIKE)
    return with_memory(hardware, device.memory_bytes or hardware.memory_bytes), known
