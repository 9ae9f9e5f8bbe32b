"""The first sentences of a report: whether the step fits, where its peak is, and what fills it. Imports no
torch.
"""

from pydantic import ValidationError

from harness.allocator import kSmallSize
from harness.architecture import ModelShape
from harness.recipe import Recipe
from harness.report.at_peak import kinds
from harness.report.groups import BEFORE
from harness.report.history import History
from harness.report.run import ReportRun
from harness.snapshot import oom_in_words, remedy
from harness.step_profile import Allocation, StepProfile, between_steps_in_words, ranks_in_words, verdict
from harness.units import in_gib, round_up

MOST_CHANGES = 3
"""The most changes that the sentences propose."""


def first_words(run: ReportRun) -> list[str]:
    """The first sentences about a run; about a snapshot those that need no recipe and no device."""
    profile = run.profile
    if profile is None:
        return [] if run.history is None else _of_snapshot(run.history)
    if profile.memory.peak_allocated_bytes is None:
        return []
    words = verdict(profile)
    sentences = [f"{words[0].upper()}{words[1:]}."]
    if profile.oom is None and profile.memory.peak_phase:
        peak = in_gib(profile.memory.peak_allocated_bytes)
        sentences.append(f"The peak, {peak} allocated, is in {profile.memory.peak_phase.replace('_', ' ')}.")
    sentences += [
        f"{words[0].upper()}{words[1:]}." for words in map(str.strip, between_steps_in_words(profile))
    ]
    if profile.ranks is not None:
        sentences += [words[0].upper() + words[1:] for words in ranks_in_words(profile.ranks)]
    sentences += _largest(profile)
    if run.shape is not None:
        sentences += _logits(profile, run.shape)
    if run.changes:
        listed = "; ".join(run.changes[:MOST_CHANGES])
        sentences.append(f"These changes would save most, by arithmetic: {listed}.")
    return sentences


def _of_snapshot(history: History) -> list[str]:
    """Why memory ran out and what would help, or the peak, or without a history what is allocated; then the
    largest category, and the code that allocated most."""
    event, total = history.moment()
    oom = history.oom
    if oom is not None:
        sentences = [*oom_in_words(oom), remedy(oom)]
    elif history.events:
        phase = history.phase()
        where = f", in {phase.replace('_', ' ')}" if phase else ""
        sentences = [
            f"The peak is {in_gib(total)} allocated, at event {event:,} of {history.events:,}{where}."
        ]
    else:
        reserved = in_gib(history.reserved_at_end_bytes)
        sentences = [f"{in_gib(total)} are allocated of {reserved} reserved; no history was recorded."]
    found = kinds(history, None)
    if not total or not found:
        return sentences
    name, size = next(iter(history.held().items()))
    if history.by_category and name != BEFORE:
        whole = "it" if oom is None else "what was allocated"
        sentences.append(f"The largest part of {whole} is {name.replace('_', ' ')}: {size / total:.0%}.")
    first = found[0]
    if first.stack:
        sentences.append(
            f"Most was asked for at {first.called_from or first.place}: {in_gib(first.total_bytes)} in "
            f"{first.num_allocations:,} allocation{'s' if first.num_allocations > 1 else ''}."
        )
    return sentences


def _largest(profile: StepProfile) -> list[str]:
    """A sentence about the largest category at the peak."""
    sizes = {name: size or 0 for name, size in profile.memory.at_peak.by_category().items()}
    total = sum(sizes.values())
    if not total:
        return []
    name = max(sizes, key=sizes.__getitem__)
    whole = "it" if profile.oom is None else "what was allocated"
    return [f"The largest part of {whole} is {name.replace('_', ' ')}: {sizes[name] / total:.0%}."]


def _logits(profile: StepProfile, shape: ModelShape) -> list[str]:
    """A sentence about the allocations that have the size of the logits, which are logits, copies of them or
    their gradients."""
    peak = profile.memory.peak_allocated_bytes
    try:
        recipe = Recipe.model_validate(profile.recipe)
    except ValidationError:
        return []
    if not peak:
        return []
    rows, tokens = recipe.rows, recipe.seq_len
    # with or without the last token, which predicts nothing; two or four bytes a value
    exact = [rows * (tokens - cut) * shape.vocab * width for cut in (0, 1) for width in (2, 4)]
    found = [a.size_bytes for a in profile.top if _of_the_model(a) and any(_is(a, size) for size in exact)]
    if not found:
        return []
    what = f"{len(found)} tensors" if len(found) > 1 else "One tensor"
    sentence = (
        f"{what} the size of the logits ({rows * tokens:,} tokens × {shape.vocab:,} words: logits, copies of "
        f"them, or their gradient) {'are' if len(found) > 1 else 'is'} {sum(found) / peak:.0%} of the peak."
    )
    return [sentence]


def _of_the_model(allocation: Allocation) -> bool:
    """Whether the forward or backward pass made it, for a time: no weight, and nothing like one."""
    in_optimizer = allocation.phase == "optimizer_step" or any("/optim/" in line for line in allocation.stack)
    return allocation.category in ("activations", "temporaries") and not in_optimizer


def _is(allocation: Allocation, size_bytes: int) -> bool:
    """Whether the block may be that of a tensor of so many bytes: the allocator rounds up, and does not split
    off a rest of up to kSmallSize."""
    most = round_up(size_bytes, 512) + min(kSmallSize, size_bytes // 8)
    return size_bytes <= allocation.size_bytes <= most
