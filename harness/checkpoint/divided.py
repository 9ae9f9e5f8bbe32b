"""Checkpoints of several ranks: each writes its own part, and any number of ranks reads them.

torch.distributed.checkpoint writes and reads the parts, in safetensors: like all files of a checkpoint they
run nothing when they are read. In the same folder are state.json and recipe.yaml, as for one process, and a
manifest of all files; the folder appears whole or not at all. All ranks must see one file system.
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
    """Make `folder`/step-N with the parts of all ranks and the files that rank 0 writes by `write`. Returns
    its path, on every rank.

    Raises InputError on every rank if rank 0 cannot make it.
    """
    tensors = _divided(training)
    path: list[Any] = [None]  # broadcast by rank 0: first where to write, then what was made; None: it failed

    def parts(beside: Path) -> None:
        path[0] = str(beside)
        dist.broadcast_object_list(path)
        _save(tensors, beside)
        write(beside)

    if dist.get_rank():
        dist.broadcast_object_list(path)
        if path[0] is not None:
            _save(tensors, Path(path[0]))
        dist.broadcast_object_list(path)
        if path[0] is None:
            raise InputError(f"rank 0 could not write the checkpoint of step {steps_done}; it says why.")
        return Path(path[0])
    try:
        made = write_checkpoint(folder, steps_done, parts)
    except InputError:
        if path[0] is None:  # it failed before the other ranks knew where to write
            dist.broadcast_object_list(path)
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
    with torch.no_grad():  # a scalar that `_divided` reshaped may be a copy, and so not the optimizer's own
        for name, _, stepped in _stepped(training) if training.optimizer.state else ():
            for key, value in training.optimizer.state[stepped].items():
                if isinstance(value, Tensor) and not value.dim():
                    value.copy_(tensors[f"optimizer.{name}.{key}"].reshape(()))


def agreed(wrong: list[str]) -> list[str]:
    """The names that any rank found `wrong`, on every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, wrong)
    return list(dict.fromkeys(name for names in found for name in names))


def _save(tensors: dict[str, Tensor], beside: Path) -> None:
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    save(tensors, storage_writer=HuggingFaceStorageWriter(str(beside), save_distributed=True))


def _divided(training: Training) -> dict[str, Any]:
    """This rank's parts, by name, of the trained weights, the optimizer's copies of them, and its state."""
    tensors: dict[str, Any] = {}
    for name, weight, stepped in _stepped(training):
        tensors[f"weights.{name}"] = weight.detach()
        if stepped is not weight:
            tensors[f"copies.{name}"] = stepped.detach()
        for key, value in training.optimizer.state.get(stepped, {}).items():
            if isinstance(value, Tensor):
                # safetensors describes a part by its place along dimensions: a scalar is given one dimension
                tensors[f"optimizer.{name}.{key}"] = value.reshape(1) if not value.dim() else value
    return tensors


def _stepped(training: Training) -> list[tuple[str, Tensor, Tensor]]:
    """(name, trained weight, the tensor that the optimizer steps for it: itself or a copy) of each weight."""
    trained = [(name, weight) for name, weight in training.model.named_parameters() if weight.requires_grad]
    stepped = [weight for group in training.optimizer.param_groups for weight in group["params"]]
    return [(name, weight, own) for (name, weight), own in zip(trained, stepped, strict=True)]


def _make_optimizer_state(training: Training) -> None:
    """One step with zero gradients and a learning rate of 0, which makes the state and moves no weight."""
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
