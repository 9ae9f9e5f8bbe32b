"""What follows the steps now and then: an evaluation, a checkpoint. The real code on shape-only tensors.

Both have peaks of their own, which no number of the step contains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.observe import tensors_in
from harness.recipe import Recipe
from harness.simulate.device import SimulatedDevice
from harness.simulate.replacement import Replacement, all_replaced
from harness.step_profile import CheckpointStats, EvaluationStats
from harness.training import (
    Evaluation,
    LoopObserver,
    Training,
    evaluate,
    save_as_trainer,
    to_host,
)

META = torch.device("meta")


@dataclass(frozen=True)
class AfterStep:
    """What to simulate behind the training steps."""

    evaluation: Evaluation | None = None
    checkpoint: bool = False


def simulate_evaluation(
    recipe: Recipe,
    training: Training,
    evaluation: Evaluation,
    device: SimulatedDevice,
    observer: LoopObserver,
    stats: EvaluationStats,
) -> None:
    """Run the evaluation and fill `stats`, also where memory runs out in it."""
    with _host_peak(device) as host_peak:
        try:
            done = evaluate(recipe, training, evaluation, META, observer, device.rules.empty_cache)
        finally:
            stats.host_bytes = host_peak()
    if done.logits is not None and done.logits_dtype is not None:
        stats.logits_bytes = done.logits.numel() * done.logits_dtype.itemsize
        stats.logits_dtype = str(done.logits_dtype).removeprefix("torch.")


def stats_of(evaluation: Evaluation) -> EvaluationStats:
    """Of an evaluation that has not begun."""
    return EvaluationStats(
        batches=evaluation.batches,
        batch_size=evaluation.batch_size,
        accumulation_steps=evaluation.accumulation_steps,
        keeps_logits=evaluation.keep_logits,
    )


def simulate_checkpoint(
    recipe: Recipe, training: Training, device: SimulatedDevice, observer: LoopObserver
) -> CheckpointStats:
    """Write a checkpoint as far as memory is concerned: no file is left."""
    files = _Files(recipe, device)
    with _host_peak(device) as host_peak, tempfile.TemporaryDirectory() as folder:
        with all_replaced(files.replacements()):
            save_as_trainer(training, Path(folder), observer)
        return CheckpointStats(
            weights_bytes=files.weights_bytes,
            optimizer_bytes=files.optimizer_bytes,
            host_bytes=host_peak(),
        )


class _Files:
    """Takes the places of what writes tensors into files: makes the copies that it would, and counts."""

    def __init__(self, recipe: Recipe, device: SimulatedDevice) -> None:
        self._recipe, self._device = recipe, device
        self.weights_bytes = self.optimizer_bytes = 0

    def replacements(self) -> Iterator[Replacement]:
        why = "wants the values of what it writes"
        if self._recipe.trains_base:
            yield Replacement("transformers.modeling_utils.safe_save_file", self._safetensors, why)
        else:
            yield Replacement("peft.peft_model.safe_save_file", self._safetensors, why)
            same = "takes all shape-only tensors for one, by their address, and copies them"
            yield Replacement("peft.peft_model.id_tensor_storage", _storage, same)
        yield Replacement("torch.save", self._pickled, why)

    def _safetensors(self, tensors: Mapping[str, Tensor], *_: Any, **__: Any) -> None:
        """safetensors.torch.save_file: every tensor of the file is copied before the first is written."""
        copies = [self._copied(tensor) for tensor in tensors.values()]
        self.weights_bytes += sum(tensor.nbytes for tensor in tensors.values())
        del copies

    def _pickled(self, tree: Any, *_: Any, **__: Any) -> None:
        """torch.save: one storage after the other is copied and written."""
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in tensors_in(tree)}
        for tensor in storages.values():
            self._copied(tensor)
            self.optimizer_bytes += tensor.untyped_storage().nbytes()

    def _copied(self, tensor: Tensor) -> Tensor | None:
        """In host memory; nothing is made where it is there already."""
        key = self._device.key_of(tensor) if tensor.is_meta else None
        if not tensor.is_meta or key in self._device.on_host:
            return None
        return to_host(tensor)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextmanager
def _host_peak(device: SimulatedDevice) -> Iterator[Callable[[], int]]:
    """Inside: a function that says how many bytes more than before were in host memory at most."""
    memory = device.memory
    before, peak = memory.host_bytes, memory.host_peak_bytes
    memory.host_peak_bytes = before
    try:
        yield lambda: memory.host_peak_bytes - before
    finally:
        memory.host_peak_bytes = max(peak, memory.host_peak_bytes)
