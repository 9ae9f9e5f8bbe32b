"""What to say when the memory ran out."""

from __future__ import annotations

from harness.console import in_gib
from harness.step_profile import StepProfile


def explain(profile: StepProfile) -> str:
    """One paragraph: where it ran out, what was asked for, what filled the memory."""
    oom = profile.oom
    assert oom is not None
    asked = "" if oom.requested_bytes is None else f" asking for {in_gib(oom.requested_bytes)}"
    free = "" if oom.free_bytes is None else f"; {in_gib(oom.free_bytes)} were free"
    idle = oom.reserved_unallocated_bytes
    split = "" if not idle else f" and {in_gib(idle)} reserved but not allocated"
    largest = ", ".join(f"{in_gib(a.size_bytes)} {a.category}" for a in oom.top[:5])
    filled = f" The largest allocations: {largest}." if largest else ""
    advice = "".join(f"\n  {line}" for line in oom.advice)
    return f"out of memory in {oom.phase}{asked} on {profile.hardware.name}{free}{split}.{filled}{advice}"
