"""`harness.run`: a recipe measured on this machine."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.answers import measured
from harness.api.arguments import AnyRecipe, asked_after, asked_recipe, checked
from harness.run_folder import RunFolder
from harness.step_profile import StepProfile
from harness.system import quiet_libraries
from harness.track import track_run, tracker_names


@checked
def run(
    recipe: AnyRecipe,
    *,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    snapshot: bool = True,
    phases: str = "train",
    evaluation: Mapping[str, int | bool] | None = None,
    track: str | Sequence[str] = (),
    **overrides: Any,
) -> StepProfile:
    """Train the recipe's steps on this machine, and return where the bytes and the milliseconds went.

    `recipe` and `overrides` as in harness.napkin. `device`: "cuda", "cuda:1" or "cpu"; None takes the first
    GPU, else the CPU. `out`: the folder for profile.json, recipe.yaml, log.jsonl and snapshot.pickle; None
    takes profiles/runs/<recipe>-<time>. `snapshot`: whether to record the memory history. `phases` and
    `evaluation` as in harness.simulate: an evaluation and a checkpoint after the training steps. `track`: the
    experiment trackers to tell the run when it is over, as in "tensorboard,wandb"; their messages go to
    stderr.

    Returns the profile. A run that is interrupted, runs out of memory or is stopped by a nan loss returns
    one too, with `complete` false and `oom` or `not_finite` filled. Raises InputError for wrong arguments, a
    folder that is taken, a device that is not there, and a recipe that cannot run here.
    """
    name, loaded = asked_recipe(recipe, overrides)
    after = asked_after(loaded, phases, evaluation)
    folder = RunFolder(None if out is None else Path(out), name, loaded)
    trackers = tracker_names([track] if isinstance(track, str) else track)
    quiet_libraries()
    from harness.training import undisturbed

    with undisturbed():
        profile = measured(loaded, folder, device, snapshot=snapshot, after=after)
    fields = loaded.model_dump(mode="json")
    track_run(trackers, folder.path, name, fields, lambda words: print(words, file=sys.stderr))
    return profile
