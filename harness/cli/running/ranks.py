"""`harness run` on several ranks: starting them on this machine, being one of them, and the run's outcome."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.terminal.terminal import Terminal, say
from harness.errors import InputError
from harness.recipe import Recipe
from harness.step_profile import StepProfile
from harness.system import FolderLock, complain, is_held, quiet_libraries

if TYPE_CHECKING:
    from harness.launch import PlaceInRanks
    from harness.run_folder import RankFolder
    from harness.training import AfterStep

MOST_RANKS_OF_A_PROCESSOR = 8
"""With more ranks a warning is printed: each imports libraries for 8 seconds of a processor, and PyTorch's
TCPStore lets ranks wait for one another for 60 seconds."""


@dataclass(frozen=True)
class RunOptions:
    """The options of `harness run`."""

    out: Path | None
    """The run folder; None for profiles/runs/<recipe>-<time>."""
    resume: Path | None
    """The run folder whose last checkpoint the run goes on from."""
    snapshot: bool
    device: str | None
    patience_s: float
    """The longest that a rank may be silent, or wait for the others, in seconds."""
    after: AfterStep | None
    """What follows the training steps."""


def run_here(name: str, recipe: Recipe, options: RunOptions) -> tuple[StepProfile | None, Path, int]:
    """Start a rank for every place of the recipe's mesh on this machine, wait for them, and print what went
    wrong.

    Returns the run's profile (None if no rank left one), its folder, and the exit status. Raises InputError
    where the ranks cannot start.
    """
    from harness.launch import start_ranks
    from harness.run_folder import RunFolder, profiles_of_ranks, put_folder_together

    quiet_libraries()
    _refuse_missing_gpus(recipe, options.device)
    _warn_of_many_ranks(recipe)
    run = RunFolder(options.out, name, recipe, options.resume)
    folder = run.path
    is_new = not folder.exists()
    run.forget_ranks()
    # every rank runs this very command; PyTorch's agent tells it which rank it is, and how many there are
    again = [sys.executable, "-m", "harness", *sys.argv[1:], "--out", str(folder)]
    ending = start_ranks(again, recipe.world_size, options.patience_s)
    reason, status = ending.reason, ending.status
    # this run's own profile is written below, so one that is there already is another run's
    taken = is_held(folder) or (options.resume is None and (folder / "profile.json").exists())
    profiles = {} if taken else profiles_of_ranks(folder)
    if not profiles:
        if is_new:
            with suppress(OSError, InputError):  # rank 0 may have made it and written nothing into it
                FolderLock(folder, "--out").release()  # removes the lock file of a rank that was killed
                folder.rmdir()
        return None, folder, complain(reason or "no rank left a profile", status or 1)
    profile = put_folder_together(folder, profiles, recipe.world_size, reason)
    if reason is not None:
        left = len(profiles)
        kept = f"{left} of {recipe.world_size} ranks left a profile, which is marked incomplete"
        complain(f"{reason.rstrip('.')}. All ranks were ended; {kept}: {folder}", status)
    return profile, folder, status


def _warn_of_many_ranks(recipe: Recipe) -> None:
    ranks, processors = recipe.world_size, os.cpu_count() or 1
    if ranks > MOST_RANKS_OF_A_PROCESSOR * processors:
        say(
            Terminal(stderr=True),
            f"warning: {ranks} ranks are as many processes, and this machine has {processors} processors: "
            "they may start too slowly for PyTorch, which has them wait 60 s for one another. One process "
            "tells what one rank takes: `harness simulate` with --rank, or `harness emulate --gpu NAME "
            f"--world-size {ranks} --rank 0 -- harness run ...`",
        )


def run_as_rank(
    name: str, recipe: Recipe, options: RunOptions, place: PlaceInRanks
) -> tuple[StepProfile | None, Path]:
    """Be one rank. Returns a profile and the run's folder.

    The profile is this rank's own, or, after a complete run whose ranks nobody watches, that of the whole run
    on rank 0 and None on the others.
    """
    from harness.cli.running.measuring import measured_with_progress
    from harness.launch import SignsOfLife, joined
    from harness.measure import chosen_device, num_gpus
    from harness.run_folder import RankFolder, RunFolder
    from harness.virtual_gpu import runs_alone

    quiet_libraries()
    kind = options.device or ("cuda" if num_gpus() else "cpu")
    device = kind if kind == "cpu" or ":" in kind else f"{kind}:{place.local_rank}"
    with joined(place, chosen_device(device), options.patience_s):
        if runs_alone():  # on a virtual GPU the other ranks are only answered for
            folder = RunFolder(options.out, name, recipe, options.resume)
        else:
            folder = _agreed(name, recipe, options, place)
        signs = SignsOfLife(place)
        speaks = place.rank == 0 or runs_alone()
        profile = measured_with_progress(
            recipe,
            folder,
            device,
            snapshot=options.snapshot,
            quiet=not speaks,
            alive=signs.tell,
            after=options.after,
        )
        signs.tell("")
        if isinstance(folder, RankFolder) and not place.watched and profile.complete:
            return _gathered(profile, folder, place), folder.path
        return profile, folder.path


def _gathered(profile: StepProfile, folder: RankFolder, place: PlaceInRanks) -> StepProfile | None:
    """On rank 0 the run's profile, made of those that the ranks send over the network, since their folders
    may be on other machines; None on the others."""
    import torch.distributed as dist

    from harness.run_folder import put_together

    texts: list[str] | None = [""] * place.world_size if place.rank == 0 else None
    dist.gather_object(profile.to_json(), texts)
    if texts is None:
        return None
    profiles = {rank: StepProfile.from_json(text, f"rank {rank}") for rank, text in enumerate(texts)}
    whole = put_together(profiles, place.world_size)
    folder.write_run(whole)
    return whole


def _agreed(name: str, recipe: Recipe, options: RunOptions, place: PlaceInRanks) -> RankFolder:
    """The run folder that rank 0 chooses for all ranks, since its name has the time in it. Rank 0 holds it
    before another rank writes into it. Raises InputError where rank 0 cannot have it."""
    import torch.distributed as dist

    from harness.run_folder import RankFolder

    chosen: list[str | None] = [None]
    folder: RankFolder | None = None
    problem: InputError | None = None
    if place.rank == 0:
        try:
            folder = RankFolder(options.out, name, recipe, options.resume, 0)
            folder.hold()
            chosen = [str(folder.path)]
        except InputError as error:
            problem = error
    dist.broadcast_object_list(chosen)
    if problem is not None:
        raise problem
    if chosen[0] is None:
        raise InputError("rank 0 cannot write the run folder; it says why.")
    return folder or RankFolder(Path(chosen[0]), name, recipe, options.resume, place.rank)


def _refuse_missing_gpus(recipe: Recipe, device: str | None) -> None:
    """Raise InputError for one GPU for all ranks, and for fewer GPUs than ranks."""
    from harness.measure import num_gpus

    if device is not None and ":" in device:
        raise InputError(f"--device {device}: every rank takes a GPU of its own. Give --device cuda or cpu.")
    found = num_gpus()
    if device != "cpu" and found and found < recipe.world_size:
        raise InputError(
            f"the mesh of the recipe has {recipe.world_size} places, a GPU each; this machine has {found}. "
            "Start with torchrun on several machines, set smaller sizes, or give --device cpu."
        )
