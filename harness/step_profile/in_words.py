"""What a profile says, in words: why memory ran out, what leaks."""

from __future__ import annotations

from harness.step_profile.step_profile import LeakReport, StepProfile
from harness.units import in_gib

MEMORY_KINDS = {
    "cuda_allocator": "the CUDA allocator's counters",
    "simulated_allocator": "a model of the CUDA allocator",
    "live_tensors": "the bytes of live CPU tensors (there is no CUDA allocator here)",
    "closed_form": "arithmetic",
}


def verdict(profile: StepProfile) -> str:
    """One sentence: whether it fits, with what to spare; without a device's size, what it takes."""
    memory, device = profile.memory, profile.hardware
    if profile.oom is not None:
        size = "" if device.memory_bytes is None else f" ({in_gib(device.memory_bytes)})"
        return f"does not fit on {device.name}{size}: the memory runs out in {profile.oom.phase}"
    known = (memory.process_bytes, memory.peak_reserved_bytes, memory.peak_allocated_bytes)
    taken = next((size for size in known if size is not None), None)
    if taken is None:
        return "no peak is known"
    if device.memory_bytes is None or device.kind == "cpu":
        return f"takes {in_gib(taken)} on {device.name}"
    spare = device.memory_bytes - taken
    room = f"{in_gib(device.memory_bytes)} of {device.name}"
    if spare < 0:
        return f"does not fit in the {room}: {in_gib(-spare)} are missing"
    return f"fits in the {room} with {in_gib(spare)} to spare"


def leak_in_words(leak: LeakReport) -> str:
    """One sentence: how fast, what, and where it was made."""
    grown = sorted(leak.by_category.items(), key=lambda item: -item[1])
    what = ", ".join(f"{name} {in_gib(size)}" for name, size in grown if size > 0)
    text = f"memory leak: {in_gib(leak.bytes_per_step)} more allocated after each of {leak.num_steps} steps"
    text += f" ({what})" if what else ""
    if leak.largest is not None:
        caller = next((line for line in leak.largest.stack if not line.startswith("torch/")), None)
        place = f" at {caller}" if caller else ""
        made = f"{in_gib(leak.largest.size_bytes)} made in {leak.largest.phase}{place}"
        text += f"; the largest left behind: {made}"
    return text


def explain_oom(profile: StepProfile) -> str:
    """One paragraph: where it ran out, what was asked for, what filled the memory; then the advice."""
    oom = profile.oom
    assert oom is not None
    asked = "" if oom.requested_bytes is None else f", asking for {in_gib(oom.requested_bytes)}"
    free = "" if oom.free_bytes is None else f" with {in_gib(oom.free_bytes)} free"
    largest = ", ".join(f"{in_gib(a.size_bytes)} of {a.category}" for a in oom.top[:5])
    filled = f" The largest tensors: {largest}." if largest else ""
    advice = "".join(f"\n  {line}" for line in oom.advice)
    what_to_do = f" What would help, by arithmetic, the cheapest first:{advice}" if advice else ""
    return f"out of memory in {oom.phase}{asked} on {profile.hardware.name}{free}.{filled}{what_to_do}"
