"""The peak of one profile in the terminal: the verdict, modules and largest allocations. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from rich.console import Console

from harness.cli.terminal.terminal import say
from harness.snapshot import by_kind_of_module, module_of_its_kind
from harness.step_profile import StepProfile, between_steps_in_words, peak_in_words, verdict
from harness.units import in_gib, ms

MODULES = 12
"""The most modules that are listed."""
FRAMES = 2
"""The most frames of a stack that are shown, innermost first; the profile has all of them."""


def print_verdict(console: Console, name: str, profile: StepProfile) -> None:
    """Print whether the recipe or program `name` fits the device, and its peaks."""
    say(console, f"{name}: {verdict(profile)}")
    say(console, f"peak: {peak_in_words(profile)}")
    for line in between_steps_in_words(profile):
        say(console, line)
    say(console, "")


def print_peak(console: Console, profile: StepProfile, *, verbose: bool) -> None:
    """Print the device's time and bytes by module, layers of one kind together, and the largest allocations,
    equal ones in one line, with `verbose` also the innermost frames of their stacks.
    """
    for line in (*_modules(profile), *_allocations(profile, verbose=verbose)):
        say(console, line)


def _modules(profile: StepProfile) -> Iterator[str]:
    seconds = profile.modules_s()
    whole = sum(seconds.values())
    yield from _first("by the device's time", seconds, lambda each: f"{ms(each):>10} ms {each / whole:>6.1%}")
    sizes = by_kind_of_module(profile.memory.at_peak_by_module or {})
    yield from _first("at the peak", dict(sizes.most_common()), lambda each: f"{in_gib(each):>10}")


def _first(what: str, by_kind: Mapping[str, Any], shown: Callable[[Any], str]) -> Iterator[str]:
    """Lines with the first MODULES of `by_kind`, whose values `shown` formats."""
    if by_kind:
        count = min(MODULES, len(by_kind))
        yield f"modules {what}, {count} of {len(by_kind)}, layers of one kind (*) together"
        yield from (f"  {shown(taken)}  {module}" for module, taken in islice(by_kind.items(), MODULES))
        yield ""


def _allocations(profile: StepProfile, *, verbose: bool) -> Iterator[str]:
    if not profile.top:
        return
    counts: Counter[tuple[int, str, str, str]] = Counter()
    for allocation in profile.top:
        module = module_of_its_kind(allocation.module) if allocation.module else "(no module)"
        stack = " < ".join(allocation.stack[:FRAMES]) if verbose else ""
        counts[allocation.size_bytes, allocation.category, module, stack] += 1
    yield f"the {len(profile.top)} largest allocations at the peak" + (
        ", with who asked for them" if verbose else " (--verbose: with who asked for them)"
    )
    for (size_bytes, category, module, stack), count in counts.items():
        times = f"{count} x" if count > 1 else ""
        yield f"  {times:>4} {in_gib(size_bytes):>10}  {category:15}  {module}"
        if stack:
            yield f"  {'':>15}  {stack}"
    yield ""
