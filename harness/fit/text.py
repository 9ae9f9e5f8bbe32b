"""The answer of `harness fit`, as lines for a terminal and as a JSON document. No torch."""

from collections.abc import Iterator
from typing import Any

from harness.fit.confirmed import ConfirmedFit
from harness.fit.exact import ExactFit
from harness.fit.held_back import cost_in_words
from harness.fit.search import FitField
from harness.hardware import Hardware
from harness.napkin import warnings_of
from harness.recipe import Recipe, surprises_of_mesh
from harness.step_profile import NCCL_COMMUNICATOR, StepProfile, is_tight, time_in_words, verdict
from harness.units import GIB, in_gib, in_ms


def fit_lines(
    name: str, where: str, recipe: Recipe, hardware: Hardware, found: ConfirmedFit
) -> Iterator[str]:
    """The verdict, the largest sizes, the effect of expandable segments, and changes that would help. `where`
    is the name of the device."""
    size = in_gib(hardware.memory_bytes)
    fits = _fits_as_it_is(recipe, found)
    seen = "it was seen to fit" if found.seen else "it fits by arithmetic"
    changed = f"; with {found.together} {seen}" if found.together and not fits else ""
    how = "by arithmetic" if found.unsimulated or not (found.seen or changed) else "as it is"
    yield f"{name} on {where} ({size}): {'fits' if fits else 'does not fit'} {how}{changed}"
    if found.unsimulated:
        yield f"  {found.unsimulated}"
    if found.num_parameters is not None:
        many, unit = (1e9, "billion") if found.num_parameters >= 1e7 else (1e6, "million")
        yield f"  the model has {found.num_parameters / many:,.2f} {unit} parameters"
    yield from _seen_lines(recipe, found) if found.seen else _arithmetic_lines(recipe, found)
    if found.changes:
        yield "Single changes that lower what it needs, the cheapest first:"
        yield f"  {'change':<44} {'saves GiB':>9} {'time a token':>13}  fits"
        for same in (True, False):
            group = [change for change in found.changes if change.same_result == same]
            if group:
                yield (
                    "  the same weights, trained to the same values:"
                    if same
                    else "  training something else:"
                )
            for change in group:
                verdict = ("yes" if change.fits else "no") + (", seen" if change.seen else "")
                cells = f"{change.saved_bytes / GIB:9.2f} {'× ' + format(change.slowdown, '.2f'):>13}"
                if len(change.overrides) <= 42:
                    yield f"    {change.overrides:<42} {cells}  {verdict}"
                else:
                    yield f"    {change.overrides}"
                    yield f"    {'':<42} {cells}  {verdict}"
    if not fits and not found.together:
        yield "No combination of them was seen to fit." if found.seen else "No combination of them fits."
    if found.together_expandable:
        yield f"With PYTORCH_ALLOC_CONF=expandable_segments:True and {found.together_expandable}"
    if found.wider:
        yield "As it is, without another change, by simulation:"
        for what, enough in found.wider.items():
            yield f"  {what}: {'fits' if enough else 'does not fit'}"
    for note in _notes(recipe, found):
        yield f"Note: {note}"


def fit_document(name: str, where: str, recipe: Recipe, found: ConfirmedFit) -> dict[str, Any]:
    """The same as plain data. `largest_` fields are arithmetic's unless `seen_by_simulation` is true."""
    arithmetic, values = found.arithmetic, _values(found)
    return {
        "recipe": name,
        "memory": where,
        "num_parameters": found.num_parameters,
        "limit_bytes": arithmetic and arithmetic.limit_bytes,
        "required_bytes": arithmetic and arithmetic.required_bytes,
        "seen_by_simulation": found.seen,
        "largest_micro_batch_size": values["micro_batch_size"],
        "largest_seq_len": values["seq_len"],
        "simulated": {
            field: exact.as_json() | {"with_expandable_segments": _expandable(field, found)}
            for field, exact in found.largest.items()
        },
        "together": found.together,
        "together_with_expandable_segments": found.together_expandable,
        "wider": found.wider,
        "held_back_by": _held_back_by(found),
        "neutral_change": found.neutral
        and {
            "overrides": found.neutral.overrides,
            "fits_micro_batch_size": found.neutral.micro_batch_size,
            "time_per_token_factor": found.neutral.slowdown,
        },
        "changes": [
            {
                "fields": change.fields,
                "saved_bytes": change.saved_bytes,
                "time_per_token_factor": change.slowdown,
                "fits": change.fits,
                "seen_by_simulation": change.seen,
                "same_result": change.same_result,
            }
            for change in found.changes
        ],
        "notes": [*([found.unsimulated] if found.unsimulated else []), *_notes(recipe, found)],
    }


def _held_back_by(found: ConfirmedFit) -> str:
    """What keeps a larger micro batch from fitting; empty where it is not known."""
    if found.seen or found.arithmetic is None:
        return found.held_back.sentence if found.held_back else ""
    return found.arithmetic.held_back


def _notes(recipe: Recipe, found: ConfirmedFit) -> list[str]:
    """Warnings about the recipe, and what the answer rests on."""
    warnings = [*surprises_of_mesh(recipe), *warnings_of(recipe)]
    if found.arithmetic is None:  # then the simulation knows the model
        seen = [exact.profile or exact.next_profile for exact in found.largest.values()]
        warnings = next((profile.warnings for profile in seen if profile), list[str]())
    return [note for note in (*warnings, *found.notes, unified_memory_note(recipe, found)) if note]


def exact_lines(name: str, where: str, recipe: Recipe, found: ExactFit) -> Iterator[str]:
    """The largest value of one field that fits, and what happens with the next one."""
    if found.value is None or found.profile is None:
        yield f"{name} on {where}: no {found.field} fits"
    else:
        memory = found.profile.memory
        peak, reserved = in_gib(memory.peak_allocated_bytes), in_gib(memory.peak_reserved_bytes)
        yield f"{name} on {where}: the largest {found.field} is {found.value}"
        yield f"  it allocates {peak} at most and reserves {reserved}"
    yield from _next_lines(recipe, found)
    seen = found.profile or found.next_profile
    for warning in seen.warnings if seen else ():
        yield f"Note: {warning}"


def _values(found: ConfirmedFit) -> dict[FitField, int]:
    """The largest value of each field; 0 where none fits."""
    if found.seen:
        return {field: exact.value or 0 for field, exact in found.largest.items()}
    assert found.arithmetic is not None
    return {"micro_batch_size": found.arithmetic.micro_batch_size, "seq_len": found.arithmetic.seq_len}


def _fits_as_it_is(recipe: Recipe, found: ConfirmedFit) -> bool:
    """Whether the recipe fits unchanged, by simulation, or by arithmetic where nothing was simulated."""
    if found.seen:
        return _values(found)["micro_batch_size"] >= recipe.micro_batch_size
    assert found.arithmetic is not None
    return found.arithmetic.required_bytes <= found.arithmetic.limit_bytes


def _with_the_other(field: FitField, recipe: Recipe) -> str:
    """The name of a field, with the value of the other one that it holds at."""
    other = "seq_len" if field == "micro_batch_size" else "micro_batch_size"
    return f"{field} at {other} {getattr(recipe, other)}"


def _seen_lines(recipe: Recipe, found: ConfirmedFit) -> Iterator[str]:
    """The largest sizes by simulation, what the next ones do, and what keeps a larger micro batch out."""
    for field, exact in found.largest.items():
        steps = f", in steps of {exact.multiple_of}" if exact.multiple_of > 1 else ""
        yield f"  largest {_with_the_other(field, recipe)}{steps}: {exact.value or 'none fits'}"
        if exact.profile is not None:
            memory = exact.profile.memory
            peak, reserved = in_gib(memory.peak_allocated_bytes), in_gib(memory.peak_reserved_bytes)
            yield f"    it allocates {peak} at most and reserves {reserved}"
            if is_tight(exact.profile):
                yield f"    {verdict(exact.profile)}"
            if memory.host_bytes:
                kind = "unified" if recipe.pages_optimizer else "host"
                yield f"    it keeps {in_gib(memory.host_bytes)} more in {kind} memory"
            yield from _speed(exact.profile)
        yield from _next_lines(recipe, exact, "    ")
        larger = _expandable(field, found)
        if larger is not None:
            yield f"    with PYTORCH_ALLOC_CONF=expandable_segments:True even {larger} fits"
    if found.held_back:
        yield f"  {found.held_back.in_words}"
    if found.neutral is not None:
        change, larger, slowdown = found.neutral
        cost = cost_in_words(slowdown)
        yield f"  with {change}, {cost}: micro_batch_size {larger} or more, seen to fit"
    yield "  seen by simulating the step; `--quick` gives estimates in a moment"


def _speed(profile: StepProfile) -> Iterator[str]:
    """The tokens per second, and the parts of a step's time."""
    step = profile.step
    if step.tokens_per_s is not None:
        known = step.tokens_per_s_range()
        interval = f" ({known[0]:,.0f} to {known[1]:,.0f})" if known else ""
        yield f"    about {step.tokens_per_s:,.0f} tokens/s{interval}"
        if parts := time_in_words(profile.parts_of_time_s()):
            yield f"    of a step's {in_ms(step.time_s.median)}: {parts}"


def _next_lines(recipe: Recipe, found: ExactFit, indent: str = "  ") -> Iterator[str]:
    """Why the value after the largest does not fit."""
    oom = found.next_profile and found.next_profile.oom
    if oom:
        requested, idle = in_gib(oom.requested_bytes), in_gib(oom.reserved_unallocated_bytes)
        yield f"{indent}{found.next_value} runs out of memory in {oom.phase}, asking for {requested}"
        if (oom.reserved_unallocated_bytes or 0) >= (oom.requested_bytes or 0):
            chance = "; a larger size may by chance leave larger ones and fit"
            yield f"{indent}though {idle} lay free in smaller pieces{chance if _has_room(found) else ''}"
        if found.one_more_bytes:
            step = f"a {recipe.unit}" if found.field == "micro_batch_size" else f"{found.multiple_of} tokens"
            yield f"{indent}{step} more takes {in_gib(found.one_more_bytes)} at the peak"
    elif found.limit is not None:
        yield f"{indent}{found.next_value or 'more'} is impossible: {found.limit}"


def _has_room(found: ExactFit) -> bool:
    """Whether the tensors of the next value would fit, if they lay without gaps between them."""
    if found.profile is None or found.one_more_bytes is None:
        return False
    memory, memory_bytes = found.profile.memory, found.profile.hardware.memory_bytes or 0
    taken = (memory.peak_allocated_bytes or 0) + (memory.cuda_context_bytes or 0)
    return taken + found.one_more_bytes <= memory_bytes


def _expandable(field: FitField, found: ConfirmedFit) -> int | None:
    """The larger value that fits with expandable segments; None if there is none."""
    return found.expandable[field].value if field in found.expandable else None


def _arithmetic_lines(recipe: Recipe, found: ConfirmedFit) -> Iterator[str]:
    """What the recipe needs, and its largest sizes, by arithmetic."""
    assert found.arithmetic is not None
    needed, limit = in_gib(found.arithmetic.required_bytes), in_gib(found.arithmetic.limit_bytes)
    yield f"  it needs {needed} at micro_batch_size {recipe.micro_batch_size} and seq_len {recipe.seq_len};"
    yield f"  there are {limit} when a margin is left to the allocator's fragmentation"
    for field, value in _values(found).items():
        yield f"  largest {_with_the_other(field, recipe)}: {value or 'none fits'}"
    rows = found.arithmetic.micro_batch_size or recipe.micro_batch_size
    yield f"  what fills the memory at micro_batch_size {rows}: {found.arithmetic.held_back}"
    if recipe.world_size > 1:
        low, high = map(in_gib, NCCL_COMMUNICATOR)
        yield f"  beside it NCCL takes {low} to {high} for each communicator, which is not counted"
    if found.fits_something:
        yield "  these are estimates to start from, not seen to fit"


def unified_memory_note(recipe: Recipe, found: ConfirmedFit) -> str:
    """A note that a fit with a paged optimizer rests on unified memory; empty where no optimizer is paged."""
    advised = [change.overrides for change in found.changes if change.fits] + [found.together]
    here = recipe.pages_optimizer
    if not here and not any("paged" in overrides for overrides in advised):
        return ""
    whose = "the paged optimizer" if here else "a paged optimizer"
    return (
        f"{whose} keeps its state in unified memory, which is not counted here: when the device is full, "
        "the driver moves it to the host on Linux. On Windows and WSL it does not, and what fits may run out."
    )
