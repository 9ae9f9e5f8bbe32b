"""The peak of one profile for reading in a terminal: its modules and its largest allocations. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from rich.console import Console

from harness.step_profile import StepProfile
from harness.units import in_gib

MODULES = 12
FRAMES = 2
"""Of a stack, innermost first; the profile has them all."""


def print_peak(console: Console, profile: StepProfile) -> None:
    """Bytes by module, layers of one kind together, and the largest allocations with their stacks."""
    for line in (*_modules(profile), *_allocations(profile)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _modules(profile: StepProfile) -> Iterator[str]:
    by_kind: Counter[str] = Counter()
    for module, size_bytes in (profile.memory.at_peak_by_module or {}).items():
        by_kind[re.sub(r"\.\d+\b", ".*", module)] += size_bytes
    if not by_kind:
        return
    shown = min(MODULES, len(by_kind))
    yield f"modules at the peak, {shown} of {len(by_kind)}, layers of one kind (*) together"
    for module, size_bytes in by_kind.most_common(MODULES):
        yield f"  {in_gib(size_bytes):>10}  {module}"
    yield ""


def _allocations(profile: StepProfile) -> Iterator[str]:
    if not profile.top:
        return
    yield f"the {len(profile.top)} largest allocations at the peak, with who asked for them"
    for allocation in profile.top:
        module = allocation.module or "(no module)"
        yield f"  {in_gib(allocation.size_bytes):>10}  {allocation.category:15}  {module}"
        if allocation.stack:
            yield f"  {'':>10}  {' < '.join(allocation.stack[:FRAMES])}"
    yield ""
