"""The folder of several ranks, ours or a watched command's: where each rank's files are, and the profile of
all.

RUN/ranks/N/ holds what rank N left. RUN/profile.json and RUN/snapshot.pickle are those of the rank that
peaks, with what all ranks saw: whoever reads a run folder reads them.
"""

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness.errors import InputError
from harness.step_profile import MOST_RANKS, RanksReport, RankStats, StepProfile
from harness.system import write_whole

RANKS = "ranks"
MAX_BYTES = 2**28
"""Of the profiles of all ranks together: some 6,000 of them."""


def folder_of_rank(run: Path, rank: int) -> Path:
    """Where rank `rank` of the run in `run` writes."""
    return run / RANKS / str(rank)


def profiles_of_ranks(run: Path) -> dict[int, StepProfile]:
    """Of the run folder `run`, by rank: those that were written whole, and lie there themselves.

    Raises InputError for more than a machine should read at once.
    """
    paths: dict[int, Path] = {}
    size_bytes = 0
    for folder in (run / RANKS).glob("*"):
        rank, path = rank_of(folder), folder / "profile.json"
        if rank is None or path.is_symlink() or not path.is_file():
            continue
        paths[rank] = path
        size_bytes += path.stat().st_size
        if len(paths) > MOST_RANKS or size_bytes > MAX_BYTES:
            raise InputError(
                f"{run / RANKS} holds more than {MOST_RANKS:,} ranks or {MAX_BYTES / 2**20:g} MiB of their "
                f"profiles. Give the folder of one of them, such as {folder}."
            )
    found: dict[int, StepProfile] = {}
    for rank in sorted(paths):
        with suppress(InputError):  # half a file of a rank that was killed, or none of ours
            found[rank] = StepProfile.read(paths[rank])
    return found


def rank_of(folder: Path) -> int | None:
    """Whose folder in RUN/ranks it is; None for what no rank made."""
    named = re.fullmatch(r"0|[1-9][0-9]{0,8}", folder.name)
    return int(named[0]) if named and not folder.is_symlink() else None


def put_together(profiles: Mapping[int, StepProfile], world_size: int, ended_by: str | None) -> StepProfile:
    """The run's profile. It is complete when every rank's is.

    Where a rank ran out of memory it is that one's; else that of the highest peak. Losses and tokens per
    second of our own loop are those of all ranks together in any case (measure/measured_run.py).
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


def put_folder_together(
    run: Path, profiles: Mapping[int, StepProfile], world_size: int, ended_by: str | None
) -> StepProfile:
    """Write the run's profile, and show the history of the rank that peaks as the run's."""
    profile = put_together(profiles, world_size, ended_by)
    assert profile.ranks is not None
    write_whole(run / "profile.json", profile.to_json() + "\n")
    snapshot = run / "snapshot.pickle"
    snapshot.unlink(missing_ok=True)
    own = folder_of_rank(run, profile.ranks.peak_rank) / snapshot.name
    if own.exists():
        try:
            os.link(own, snapshot)
        except OSError:  # a file system without links
            shutil.copyfile(own, snapshot)
    return profile


def read_profile(path: Path) -> StepProfile:
    """The profile of a run folder, or in a profile.json; of ranks that nobody put together, all of them.

    Raises InputError if there is none.
    """
    if not os.path.isdir(path):
        return StepProfile.read(path)
    profiles = {} if os.path.lexists(path / "profile.json") else profiles_of_ranks(path)
    if not profiles:
        return StepProfile.read(path / "profile.json")
    return put_together(profiles, world_size_of(profiles), None)


def world_size_of(profiles: Mapping[int, StepProfile]) -> int:
    """How many ranks there were, by those that left a profile."""
    told = (profile.provenance.get("world_size") for profile in profiles.values())
    return max([max(profiles) + 1, *(size for size in told if isinstance(size, int))])


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
