"""`harness run`."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import (
    EvalAccumulationSteps,
    EvalBatches,
    EvalBatchSize,
    EvalLossOnly,
    FullStateDict,
    Overrides,
    Phases,
    RecipeName,
    Track,
    asked_recipe,
    what_follows,
)
from harness.cli.exit_status import INTERRUPTED, NOT_FINITE, OUT_OF_MEMORY
from harness.cli.running.ranks import RunOptions, run_as_rank, run_here
from harness.cli.terminal.profile_tables import print_profile
from harness.cli.terminal.terminal import Terminal, say
from harness.recipe import Recipe, on_ranks
from harness.step_profile import StepProfile, between_steps_in_words, explain_oom
from harness.system import complain, quiet_libraries, stdout_kept_for_json

if TYPE_CHECKING:
    from harness.launch import PlaceInRanks


EXAMPLES = """
Examples:
  harness run smoke
  harness run llama-3.2-1b-bf16 seq_len=4096 gradient_checkpointing=true
  harness run mine.yaml steps=20 --json > mine.json
  harness run mine.yaml steps=1000 checkpoint_every=100 --out here
  harness run mine.yaml steps=1000 checkpoint_every=100 --resume here
  harness run mine.yaml --phases train,eval,save --eval-accumulation-steps 1
  harness run mine.yaml parallel=fsdp --gpus 2
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST -m harness run mine.yaml
Exit status: 0 fine; 2 bad input or impossible here; 3 out of memory;
4 stopped by a nan or infinite loss; 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP; 1 a bug.
On several ranks: of the first that ended badly; 137 if it was killed.
All but 1 and 2 leave a profile.
"""


def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for profile.json, recipe.yaml, log.jsonl and snapshot.pickle. "
            "Default: profiles/runs/<recipe>-<time>, or the folder that is resumed."
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on after the last checkpoint in this run folder (recipe: checkpoint_every). The recipe "
            "is the same: only steps, warmup_steps, checkpoint_every and on_nan may change.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the profile as JSON on stdout, everything else on stderr.")
    ] = False,
    snapshot: Annotated[
        bool, typer.Option(help="Write snapshot.pickle (on a GPU: record the memory history).")
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, ... or cpu. Default: the first GPU, else the CPU.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Run on a virtual GPU, a device of the table: all but losses, and estimated times."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run on so many ranks of this machine, a GPU each (recipe: parallel). Sizes of the mesh "
            "that are left out follow. With --gpu: how many virtual GPUs there are.",
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            min=1, help="Seconds that a rank may be silent, or wait for the others, before all are ended."
        ),
    ] = 600,
    phases: Phases = "train",
    eval_batches: EvalBatches = None,
    eval_batch_size: EvalBatchSize = None,
    eval_accumulation_steps: EvalAccumulationSteps = None,
    eval_loss_only: EvalLossOnly = False,
    full_state_dict: FullStateDict = False,
    track: Track = None,
) -> None:
    """Run a recipe on this machine and record where the bytes and milliseconds went."""
    name, loaded = asked_recipe(recipe, overrides or [])
    place = None
    if loaded.distributed or gpus is not None or "RANK" in os.environ:
        loaded, place = _on_ranks(loaded, gpu, gpus)
    if gpu is not None:
        from harness.virtual_gpu import Options, emulate, emulated_device

        if emulated_device() != gpu.lower():  # this very command again, on virtual GPUs
            command = [sys.executable, "-m", "harness", *sys.argv[1:]]
            emulate(command, Options(gpu, gpus or loaded.world_size))
    how = eval_batches, eval_batch_size, eval_accumulation_steps, eval_loss_only, full_state_dict
    after = what_follows(loaded, phases, *how)
    from harness.cli.running.measuring import measured_with_progress
    from harness.run_folder import RunFolder
    from harness.track import track_run, tracker_names
    from harness.virtual_gpu import runs_alone

    trackers = tracker_names(track or [])
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        status = None
        if loaded.distributed:
            options = RunOptions(out, resume, snapshot, device, patience, after)
            if place is None:
                profile, path, status = run_here(name, loaded, options)
            else:
                profile, path = run_as_rank(name, loaded, options, place)
            if profile is None or (place is not None and place.watched):
                raise typer.Exit(_status(profile, loaded) if profile and status is None else status or 0)
        else:
            folder = RunFolder(out, name, loaded, resume)
            profile = measured_with_progress(loaded, folder, device, snapshot=snapshot, after=after)
            path = folder.path
        people = Terminal(stderr=as_json)
        say(people, f"{name}: {loaded.model} on {profile.hardware.name}")
        print_profile(people, profile)
        for line in between_steps_in_words(profile):
            say(people, line)
        say(people, f"run folder: {path}", whole=True)
        if place is None or place.rank == 0 or runs_alone():  # else rank 0 tells
            told = partial(say, Terminal(stderr=True), whole=True)
            track_run(trackers, path, name, loaded.model_dump(mode="json"), told)
    if as_json:
        print(profile.to_json())
    raise typer.Exit(_status(profile, loaded) if status is None else status)


def _on_ranks(recipe: Recipe, gpu: str | None, gpus: int | None) -> "tuple[Recipe, PlaceInRanks | None]":
    """The recipe with a mesh for as many ranks as there are, and this process's place if it is a rank."""
    from harness.launch import place_in_ranks

    place = place_in_ranks()
    if place is not None:
        return on_ranks(recipe, place.world_size, f"WORLD_SIZE is {place.world_size}"), place
    if gpus is not None and (recipe.distributed or gpu is None):  # else one process sees so many virtual GPUs
        recipe = on_ranks(recipe, gpus, f"--gpus {gpus}")
    return recipe, None


def _status(profile: StepProfile, recipe: Recipe) -> int:
    """Print what went wrong with a run, if anything did. Returns its exit status."""
    if profile.oom is not None:
        return complain(explain_oom(profile), OUT_OF_MEMORY)
    if profile.complete:
        return 0
    from harness.measure import total_steps

    total, wrong = total_steps(recipe), profile.not_finite
    if wrong is not None:
        last = wrong.checkpoint or "none (recipe: checkpoint_every)"
        return complain(
            f"stopped: {wrong.in_words()} of {total}. {wrong.origin_in_words()} "
            f"The last good checkpoint: {last}. "
            "A lower learning_rate, max_grad_norm or precision=bf16 may help; "
            "on_nan=continue goes on and records it. The profile so far is marked incomplete",
            NOT_FINITE,
        )
    done = len(profile.step.loss or [])
    return complain(
        f"interrupted after {done} of {total} steps; the profile so far is marked incomplete", INTERRUPTED
    )
