"""`harness diff --fail-above`: whether a peak grew from one profile to another by more than is allowed.
Imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.answers.two_profiles import ProfileDiff
from harness.errors import InputError
from harness.hardware import parse_bytes
from harness.step_profile import PHASES_BETWEEN_STEPS
from harness.units import in_gib


@dataclass(frozen=True)
class Allowed:
    """By how much a peak may grow: by a share of itself, or by a number of bytes."""

    text: str
    """The limit as the user wrote it."""
    share: float | None
    """The share of the first profile's peak; None where `size_bytes` is the limit."""
    size_bytes: int = 0

    def bytes_of(self, first: int) -> int:
        """How many bytes a peak of `first` bytes may grow by."""
        return self.size_bytes if self.share is None else int(first * self.share)


def allowed(text: str) -> Allowed:
    """Read a limit: "5%", a size such as "512MiB", or 0 for no growth. Raises InputError."""
    percent = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%?\s*", text)
    if percent is not None and ("%" in text or float(percent[1]) == 0):
        return Allowed(text.strip(), float(percent[1]) / 100)
    try:
        return Allowed(text.strip(), None, parse_bytes(text))
    except InputError:
        raise InputError(
            f"--fail-above {text}: give a percentage as in 5%, a size as in 512MiB, or 0 for no byte more."
        ) from None


def diff_document(diff: ProfileDiff, names: tuple[str, str], limit: Allowed | None) -> dict[str, Any]:
    """What `harness diff --json` prints, as plain data; with a limit also the peaks that grew beyond it."""
    gate = {} if limit is None else {"fail_above": limit.text, "beyond": list(beyond(diff, limit))}
    return {"first": names[0], "second": names[1], **diff.as_json(), **gate}


def beyond(diff: ProfileDiff, limit: Allowed) -> Iterator[str]:
    """A sentence for each peak that grew by more than `limit`: the training's, and those of evaluation,
    generation and saving. A second profile without a peak, because its run ended before, is beyond any limit.
    Raises InputError where the first profile has no peak.
    """
    if diff.peak.first is None:
        raise InputError("--fail-above: the first profile has no peak to hold the second against.")
    if diff.peak.second is None:
        ended = "runs out of memory" if diff.second_ran_out else "ended before a step was recorded"
        yield f"the second has no peak: it {ended}"
    apart = [row for row in diff.bytes if row.place in PHASES_BETWEEN_STEPS and row.name == "peak"]
    for name, row in [("training", diff.peak), *((row.place, row) for row in apart)]:
        if row.first is None or row.second is None:
            continue
        grown = row.second - row.first
        if grown > limit.bytes_of(row.first):
            share = f" ({grown / row.first:+.1%})" if row.first else ""
            sizes = f"from {in_gib(row.first)} to {in_gib(row.second)}, by {in_gib(grown)}"
            yield f"the peak of {name} grew {sizes}{share}"
