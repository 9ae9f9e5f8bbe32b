"""`harness.napkin` and `harness.simulate`: answers without a GPU."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.allocator import allocator_settings
from harness.answers import predicted, simulated
from harness.api.arguments import AnyRecipe, DeviceName, asked_after, asked_hardware, asked_recipe, checked
from harness.hardware import DEFAULT_HARDWARE
from harness.run_folder import RunFolder
from harness.step_profile import StepProfile
from harness.system import quiet_libraries


@checked
def napkin(
    recipe: AnyRecipe,
    *,
    hardware: DeviceName = DEFAULT_HARDWARE,
    memory: str | int | None = None,
    **overrides: Any,
) -> StepProfile:
    """Memory and time of a step by the textbook's arithmetic: about right, in milliseconds, no PyTorch.

    `recipe` is a harness.Recipe, a name in recipes/ or the path of a YAML file; `overrides` are its fields
    to change, as in seq_len=4096. `hardware` is a device of the table, and `memory` another size of it, as
    in "16GiB", or bytes. Returns the profile, whose `oom` is filled where the step does not fit. Raises
    InputError for a recipe, a device or a size that is wrong, and a config that gives no sizes.
    """
    name, loaded = asked_recipe(recipe, overrides)
    profile = predicted("napkin", loaded, asked_hardware(hardware, memory))
    profile.provenance["recipe_name"] = name
    return profile


@checked
def simulate(
    recipe: AnyRecipe,
    *,
    hardware: DeviceName = DEFAULT_HARDWARE,
    memory: str | int | None = None,
    allocator: str | None = None,
    out: str | os.PathLike[str] | None = None,
    rank: int = 0,
    phases: str = "train",
    evaluation: Mapping[str, int | bool] | None = None,
    full_state_dict: bool = False,
    **overrides: Any,
) -> StepProfile:
    """The training step on shape-only tensors: memory to the byte and estimated time, without a GPU.

    `recipe`, `hardware`, `memory` and `overrides` as in harness.napkin. `allocator`: settings of the CUDA
    caching allocator, as in "expandable_segments:True"; None takes those of PYTORCH_CUDA_ALLOC_CONF or
    PYTORCH_ALLOC_CONF. `rank`: which one, of a recipe that is divided among several. `phases`:
    "train,eval,save" adds an evaluation as transformers' Trainer does it, and its checkpoint; `evaluation`
    chooses its batches, batch_size, accumulation_steps and keep_logits; with `full_state_dict` rank 0
    gathers a divided model and writes it.

    `out`: a new folder for profile.json, recipe.yaml and snapshot.pickle.
    Returns the profile, whose `oom` says where the memory ran out and what would help. Raises InputError for
    wrong arguments, a folder that is taken, and a recipe that cannot be simulated (compile: true).
    """
    name, loaded = asked_recipe(recipe, overrides)
    device = asked_hardware(hardware, memory)
    settings = allocator_settings(os.environ, allocator)
    after = asked_after(loaded, phases, evaluation, full_state_dict=full_state_dict)
    folder = None if out is None else RunFolder(Path(out), name, loaded)
    quiet_libraries()
    return simulated(name, loaded, device, settings, folder=folder, rank=rank, after=after)
