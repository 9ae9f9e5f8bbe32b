"""A report's first sentences: whether it fits, where the peak is, what it is made of. Imports no torch."""

from __future__ import annotations

from harness.architecture import ModelShape
from harness.report.run import ReportRun
from harness.step_profile import CATEGORIES, StepProfile, verdict
from harness.units import in_gib

MOST_CHANGES = 3


def first_words(run: ReportRun) -> list[str]:
    """Sentences; none for a snapshot, which has no recipe and no device."""
    profile = run.profile
    if profile is None or profile.memory.peak_allocated_bytes is None:
        return []
    words = verdict(profile)
    sentences = [f"{words[0].upper()}{words[1:]}."]
    if profile.oom is None and profile.memory.peak_phase:
        peak = in_gib(profile.memory.peak_allocated_bytes)
        sentences.append(f"The peak, {peak} allocated, is in {profile.memory.peak_phase.replace('_', ' ')}.")
    sentences += _largest(profile)
    if run.shape is not None:
        sentences += _logits(profile, run.shape)
    if run.changes:
        listed = "; ".join(run.changes[:MOST_CHANGES])
        sentences.append(f"These changes would save most, by arithmetic: {listed}.")
    return sentences


def _largest(profile: StepProfile) -> list[str]:
    """The largest category."""
    sizes = {name: getattr(profile.memory.at_peak, f"{name}_bytes") or 0 for name in CATEGORIES}
    total = sum(sizes.values())
    if not total:
        return []
    name = max(sizes, key=sizes.__getitem__)
    return [f"The largest part of it is {name.replace('_', ' ')}: {sizes[name] / total:.0%}."]


def _logits(profile: StepProfile, shape: ModelShape) -> list[str]:
    """Tensors of a number for every token and word, known by their size: logits, copies, gradients."""
    recipe, peak = profile.recipe or {}, profile.memory.peak_allocated_bytes
    rows, tokens = recipe.get("micro_batch_size"), recipe.get("seq_len")
    if not isinstance(rows, int) or not isinstance(tokens, int) or not peak:
        return []
    # with or without the last token, which predicts nothing; two or four bytes a number; in blocks of 512
    exact = {rows * (tokens - cut) * shape.vocab * width for cut in (0, 1) for width in (2, 4)}
    sizes = exact | {-(-size // 512) * 512 for size in exact}
    found = [a.size_bytes for a in profile.top if a.size_bytes in sizes and a.category != "parameters"]
    if not found:
        return []
    what = f"{len(found)} tensors" if len(found) > 1 else "One tensor"
    said = (
        f"{what} the size of the logits ({rows * tokens:,} tokens × {shape.vocab:,} words: logits, copies of "
        f"them, or their gradient) {'are' if len(found) > 1 else 'is'} {sum(found) / peak:.0%} of the peak."
    )
    return [said]
