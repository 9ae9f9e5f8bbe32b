"""A checkpoint behind the recorded steps: written as transformers' Trainer does it, counted, and removed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness.errors import InputError, is_out_of_memory
from harness.observe import storage_of, tensors_in
from harness.step_profile import CheckpointStats
from harness.training import CANNOT_WRITE, LoopObserver, Training, save_as_trainer


def measure_checkpoint(training: Training, run: Path, observer: LoopObserver) -> CheckpointStats:
    """Write a checkpoint into the folder `run`, and remove it. Raises InputError for a disk that is full."""
    try:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=run) as folder:
            save_as_trainer(training, Path(folder), observer)
            weights_bytes = sum(map(_tensor_bytes, Path(folder).glob("*.safetensors")))
    except CANNOT_WRITE as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"the checkpoint cannot be written in {run}: {error}. Make room, give another --out, or leave "
            "save out of --phases."
        ) from None
    storages = {
        (storage := storage_of(tensor)).data_ptr(): storage.nbytes()
        for tensor in tensors_in(training.optimizer.state_dict())
    }
    return CheckpointStats(weights_bytes=weights_bytes, optimizer_bytes=sum(storages.values()))


def _tensor_bytes(path: Path) -> int:
    """A safetensors file is the length of its header in 8 bytes, the header, and the tensors."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header
