"""Checkpoints of several ranks: each writes its own part, and any number of ranks reads them.

torch.distributed.checkpoint writes and reads the parts, in safetensors: like all files of a checkpoint they
run nothing when they are read. Beside them lie the same state.json and recipe.yaml as of one process, and a
manifest of all; the folder appears whole or not at all. All ranks see one file system.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import InputError
from harness.run_folder import write_checkpoint
from harness.training import Training


def write_together(folder: Path, steps_done: int, training: Training, write: Callable[[Path], None]) -> Path:
    """Make `folder`/step-N of the parts of all ranks and of what rank 0 writes by `write`.

    Raises InputError on every rank if rank 0 cannot make it.
    """
    tensors = _divided(training)
    told: list[Any] = [None]

    def parts(beside: Path) -> None:
        told[0] = str(beside)
        dist.broadcast_object_list(told)
        _save(tensors, beside)
        write(beside)

    if dist.get_rank():
        dist.broadcast_object_list(told)
        if told[0] is not None:
            _save(tensors, Path(told[0]))
        dist.broadcast_object_list(told)
        if told[0] is None:
            raise InputError(f"rank 0 could not write the checkpoint of step {steps_done}; it says why.")
        return Path(told[0])
    try:
        made = write_checkpoint(folder, steps_done, parts)
    except InputError:
        if told[0] is None:  # it failed before the others were told where
            dist.broadcast_object_list(told)
        dist.broadcast_object_list([None])
        raise
    dist.broadcast_object_list([str(made)])
    return made


def read_together(path: Path, training: Training) -> None:
    """Put this rank's parts of the checkpoint into a training that has made no step."""
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    _make_optimizer_state(training)
    tensors = _divided(training)
    load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
    if training.optimizer.state:  # what was loaded is a copy where it was no tensor of two dimensions
        _take(training, tensors)


def agreed(wrong: list[str]) -> list[str]:
    """What any rank found wrong, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    return list(dict.fromkeys(name for names in found for name in names))


def _save(tensors: dict[str, Tensor], beside: Path) -> None:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    save(tensors, storage_writer=HuggingFaceStorageWriter(str(beside), save_distributed=True))


def _divided(training: Training) -> dict[str, Any]:
    """By name: the trained weights, the optimizer's copies of them, and its state for each."""
    tensors: dict[str, Any] = {}
    for name, weight, stepped in _stepped(training):
        tensors[f"weights.{name}"] = weight.detach()
        if stepped is not weight:
            tensors[f"copies.{name}"] = stepped.detach()
        for key, value in training.optimizer.state.get(stepped, {}).items():
            if isinstance(value, Tensor):
                # safetensors keeps a part by its place along dimensions: a scalar gets one
                tensors[f"optimizer.{name}.{key}"] = value.reshape(1) if not value.dim() else value
    return tensors


def _take(training: Training, tensors: dict[str, Any]) -> None:
    with torch.no_grad():
        for name, _, stepped in _stepped(training):
            for key, value in training.optimizer.state[stepped].items():
                if isinstance(value, Tensor) and not value.dim():
                    value.copy_(tensors[f"optimizer.{name}.{key}"].reshape(()))


def _stepped(training: Training) -> list[tuple[str, Tensor, Tensor]]:
    """(name, trained weight, what the optimizer steps for it)."""
    trained = [(name, weight) for name, weight in training.model.named_parameters() if weight.requires_grad]
    stepped = [weight for group in training.optimizer.param_groups for weight in group["params"]]
    return [(name, weight, other) for (name, weight), other in zip(trained, stepped, strict=True)]


def _make_optimizer_state(training: Training) -> None:
    """One step without gradients' values and without a rate, which makes the state and moves no weight."""
    groups = training.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
