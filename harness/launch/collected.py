"""What the ranks of a run left, put together: the profile of the one that peaks, with what all saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.errors import InputError
from harness.step_profile import RanksReport, RankStats, StepProfile


def profiles_of_ranks(folder: Path) -> dict[int, StepProfile]:
    """Of the run folder `folder`, by rank: those that were written whole."""
    found = {}
    for path in folder.glob("ranks/*/profile.json"):
        try:
            found[int(path.parent.name)] = StepProfile.read(path)
        except (InputError, ValueError):  # half a file of a rank that was killed, or none of ours
            continue
    return dict(sorted(found.items()))


def put_together(profiles: Mapping[int, StepProfile], world_size: int, ended_by: str | None) -> StepProfile:
    """The run's profile. It is complete when every rank's is.

    Where a rank ran out of memory it is that one's; else that of the highest peak. Losses and tokens per
    second are those of all ranks together in any case (measure/measured_run.py).
    """
    peak = max(profiles, key=lambda rank: _peak(profiles[rank]))
    told = next((rank for rank, profile in profiles.items() if profile.oom is not None), peak)
    profile = profiles[told].model_copy(deep=True)
    profile.complete = (
        ended_by is None and len(profiles) == world_size and all(p.complete for p in profiles.values())
    )
    profile.ranks = RanksReport(
        world_size=world_size,
        peak_rank=told,
        ranks=[_stats(rank, profile) for rank, profile in profiles.items()],
        ended_by=ended_by,
    )
    return profile


def _peak(profile: StepProfile) -> tuple[int, int]:
    memory = profile.memory
    return memory.peak_allocated_bytes or 0, memory.peak_reserved_bytes or 0


def _stats(rank: int, profile: StepProfile) -> RankStats:
    medians = {name: stats.time_s.median for name, stats in profile.phases.items()}
    waits = {name: stats.communication_s for name, stats in profile.phases.items()}
    return RankStats(
        rank=rank,
        host=profile.provenance.get("host"),
        device=profile.hardware.name,
        complete=profile.complete,
        peak_phase=profile.memory.peak_phase,
        peak_allocated_bytes=profile.memory.peak_allocated_bytes,
        peak_reserved_bytes=profile.memory.peak_reserved_bytes,
        step_s=profile.step.time_s.median,
        phases_s={name: seconds for name, seconds in medians.items() if seconds is not None},
        communication_s={name: seconds for name, seconds in waits.items() if seconds is not None},
    )
