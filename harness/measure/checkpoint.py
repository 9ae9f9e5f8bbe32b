"""A checkpoint after the recorded steps: written as transformers' Trainer does it, measured, and removed."""

import tempfile
from dataclasses import asdict
from pathlib import Path

from harness.errors import InputError, is_out_of_memory
from harness.recipe import Recipe
from harness.step_profile import CheckpointStats
from harness.training import CANNOT_WRITE, LoopObserver, Training, save_as_trainer


def measure_checkpoint(
    recipe: Recipe, training: Training, run: Path, observer: LoopObserver, *, whole_state: bool
) -> CheckpointStats:
    """Write a checkpoint into the folder `run`, and remove it. `whole_state`: rank 0 gathers a divided model
    and writes it whole. Raises InputError if it cannot be written, such as on a full disk."""
    try:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=run) as folder:
            written = save_as_trainer(recipe, training, Path(folder), observer, whole=whole_state)
    except CANNOT_WRITE as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"the checkpoint cannot be written in {run}: {error}. Make room, give another --out, or leave "
            "save out of --phases."
        ) from None
    return CheckpointStats(**asdict(written))
