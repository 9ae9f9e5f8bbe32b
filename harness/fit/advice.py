"""Advice after a step ran out of memory: which changes of the recipe would make it fit.

The changes and their savings are napkin's estimates (fit/changes.py); what is called enough was simulated.
Measuring and simulating may import neither, so the commands hand them `advise` as an argument.
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
"""No more changes than this are listed."""
MOST_SIMULATED = 3
"""No more changes than this are simulated."""
MOST_MICRO_BATCHES = 32
"""A step of more micro batches is not simulated here: it takes longer than advice may."""
NOT_ON_WINDOWS = ", not on Windows or WSL"
"""Added to changes that need unified memory: there the driver does not move it to the host when the device is
full (CUDA C++ Programming Guide, unified memory on Windows and WSL)."""
STAND_IN = "a100-80gb"
"""The device that stands for one that is not in the table of devices."""


def advise(recipe: Recipe, device: HardwareSummary, report: OutOfMemoryReport) -> list[str]:
    """Lines that each name a change, the memory that it saves and its cost in time.

    An allocator setting that costs nothing comes first, then changes that keep the training's result, then
    others; each group is sorted by time. Of the changes beyond MOST_CHANGES only the first that is enough by
    itself is listed. The figures are napkin's; where it cannot estimate, a line says why. Of the changes that
    are enough by arithmetic, the first few are simulated until one fits, if the device is in the table; of
    the others it is said that they may be enough.
    """
    lines: list[str] = []
    idle = report.reserved_unallocated_bytes or 0
    if report.requested_bytes is not None and idle >= report.requested_bytes:
        lines.append(
            f"PYTORCH_ALLOC_CONF=expandable_segments:True: {in_gib(idle)} are reserved, but in pieces"
        )
    name = TABLE_NAMES.get(device.name, device.name)
    known = name in hardware_names()
    hardware = find_hardware(name if known else STAND_IN)
    hardware = with_memory(hardware, device.memory_bytes or hardware.memory_bytes)
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
    simulated = _simulated(recipe, hardware, changes) if known else {}
    enough = next((c for c in changes if simulated.get(c.overrides, not simulated and c.fits)), None)
    listed = changes[:MOST_CHANGES]
    if enough is not None and enough not in listed:
        listed[-1] = enough
    for change in listed:
        time = f", time a token × {change.slowdown:.2f}" if known else ""
        result = "" if change.same_result else ", another training"
        fits = simulated.get(change.overrides)
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


def _simulated(recipe: Recipe, hardware: Hardware, changes: list[Change]) -> dict[str, bool]:
    """Whether the recipe with a change fits in a simulation, by the change's overrides.

    The first changes that are enough by arithmetic are simulated, until one fits. Empty where none can be.
    """
    simulations, found = Simulations(hardware), dict[str, bool]()
    for change in [change for change in changes if change.fits][:MOST_SIMULATED]:
        other = changed(recipe, change.fields)
        if other.gradient_accumulation_steps > MOST_MICRO_BATCHES:
            continue
        try:
            found[change.overrides] = simulations.profile(other).oom is None
        except InputError:
            continue
        if found[change.overrides]:
            break
    simulations.keep()
    return found
