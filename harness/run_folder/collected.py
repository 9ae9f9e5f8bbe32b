"""The run folder of several ranks, of a recipe or of a watched command: each rank's files, and the profile of
the whole run.

RUN/ranks/N/ holds what rank N left. RUN/snapshot.pickle is that of the rank with the highest peak, and
RUN/profile.json is that rank's profile with a summary of all ranks. Whoever reads a run folder reads these.
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
"""The folder in a run folder that holds a folder for each rank."""
MAX_BYTES = 2**28
"""The most bytes that the profiles of all ranks may have together: those of some 6,000 ranks."""


def folder_of_rank(run: Path, rank: int) -> Path:
    """The folder that rank `rank` of the run in `run` writes its files to."""
    return run / RANKS / str(rank)


def profiles_of_ranks(run: Path) -> dict[int, StepProfile]:
    """The ranks' profiles in the run folder `run`, by rank. Links, and files that are no whole profile, are
    left out. Raises InputError for more of them than a machine should read at once.
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
        with suppress(InputError):  # half a file of a rank that was killed, or another program's
            found[rank] = StepProfile.read(paths[rank])
    return found


def rank_of(folder: Path) -> int | None:
    """The rank that a folder in RUN/ranks belongs to; None for a folder that no rank made."""
    number = re.fullmatch(r"0|[1-9][0-9]{0,8}", folder.name)
    return int(number[0]) if number and not folder.is_symlink() else None


def put_together(
    profiles: Mapping[int, StepProfile], world_size: int | None = None, ended_by: str | None = None
) -> StepProfile:
    """The run's profile, made of its ranks' profiles. `world_size` is by default what they say.

    It is the profile of the rank that ran out of memory, or else of the rank with the highest peak, with a
    summary of all ranks. It is complete if every rank's is and nothing ended the run early: `ended_by` says
    in words what did, or is None. In a run of a recipe the losses and the tokens per second in every rank's
    profile are already those of all ranks together (measure/measured_run.py).
    """
    if world_size is None:
        stated = (profile.provenance.get("world_size") for profile in profiles.values())
        world_size = max([max(profiles) + 1, *(size for size in stated if isinstance(size, int))])
    memory = {rank: profile.memory for rank, profile in profiles.items()}
    peaks = {rank: (m.peak_allocated_bytes or 0, m.peak_reserved_bytes or 0) for rank, m in memory.items()}
    highest = max(peaks, key=peaks.__getitem__)
    shown = next((rank for rank, profile in profiles.items() if profile.oom is not None), highest)
    profile = profiles[shown].model_copy(deep=True)
    profile.complete = (
        ended_by is None and len(profiles) == world_size and all(p.complete for p in profiles.values())
    )
    profile.ranks = RanksReport(
        world_size=world_size,
        peak_rank=shown,
        ranks=[_stats(rank, profile) for rank, profile in profiles.items()],
        ended_by=ended_by,
    )
    return profile


def put_folder_together(
    run: Path,
    profiles: Mapping[int, StepProfile],
    world_size: int | None = None,
    ended_by: str | None = None,
) -> StepProfile:
    """Write the run's profile into the folder `run`, and the snapshot of the rank whose profile it is."""
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
    """The profile of a run folder, or in a profile.json. Where a run of several ranks was killed before it
    wrote its profile, it is made of those of the ranks. Raises InputError if there is none.
    """
    if not os.path.isdir(path):
        return StepProfile.read(path)
    profiles = {} if os.path.lexists(path / "profile.json") else profiles_of_ranks(path)
    if not profiles:
        return StepProfile.read(path / "profile.json")
    return put_together(profiles)


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
