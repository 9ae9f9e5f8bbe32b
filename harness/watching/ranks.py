"""The ranks of one command side by side: which one peaks, how far they differ, which one is late."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from harness.step_profile import StepProfile
from harness.units import in_gib, ms

WORTH_SAYING = 1.1
"""A rank that takes this many times the median of all is named in words."""


@dataclass(frozen=True)
class RankSummary:
    """What the ranks' profiles say together. Bytes and seconds; None for what no rank knows."""

    peaks: dict[int, int]
    """Largest allocated bytes of the recorded steps, by rank."""
    peak_rank: int | None
    spread_bytes: int | None
    """Between the rank that peaks and the one that peaks lowest."""
    phases: dict[str, dict[int, float]]
    """Median seconds of each phase, by rank."""
    stragglers: dict[str, int]
    """By phase: the rank that takes longest in it. In backward, where gradients are exchanged, the others
    wait for the last one: who takes longest there came first."""

    def to_json(self) -> str:
        """The content of ranks.json."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def in_words(self) -> list[str]:
        """A sentence for each finding."""
        said = []
        if self.peak_rank is not None and self.spread_bytes is not None:
            peak = self.peaks[self.peak_rank]
            said.append(
                f"{len(self.peaks)} ranks: rank {self.peak_rank} peaks, at {in_gib(peak)}; the lowest is "
                f"{in_gib(self.spread_bytes)} ({self.spread_bytes / peak:.1%}) below it."
            )
        for phase, rank in self.stragglers.items():
            times = self.phases[phase]
            middle = median(times.values())
            if times[rank] > WORTH_SAYING * middle:
                said.append(
                    f"{phase}: rank {rank} takes longest, {ms(times[rank])} ms; the median of all is "
                    f"{ms(middle)} ms."
                )
        return said


def rank_folders(out: Path) -> list[Path]:
    """The run folders of the ranks in `out`, in their order; those without a profile are left out."""
    named = [(path, re.fullmatch(r"rank-(\d+)", path.name)) for path in out.glob("rank-*")]
    found = {int(match[1]): path for path, match in named if match is not None}
    return [found[rank] for rank in sorted(found) if (found[rank] / "profile.json").is_file()]


def summary_of_ranks(folders: list[Path]) -> RankSummary:
    """Raises InputError for a profile that cannot be read."""
    profiles = {int(path.name.split("-")[1]): StepProfile.read(path / "profile.json") for path in folders}
    peaks = {
        rank: profile.memory.peak_allocated_bytes
        for rank, profile in profiles.items()
        if profile.memory.peak_allocated_bytes is not None
    }
    phases: dict[str, dict[int, float]] = {}
    for rank, profile in profiles.items():
        for name in profile.phase_names():
            seconds = profile.phases[name].time_s.median
            if seconds is not None:
                phases.setdefault(name, {})[rank] = seconds
    peak_rank = max(peaks, key=peaks.__getitem__, default=None)
    return RankSummary(
        peaks=peaks,
        peak_rank=peak_rank,
        spread_bytes=max(peaks.values()) - min(peaks.values()) if peaks else None,
        phases=phases,
        stragglers={
            name: max(times, key=times.__getitem__) for name, times in phases.items() if len(times) > 1
        },
    )
