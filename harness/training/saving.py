"""Writes a checkpoint between training steps, as transformers' Trainer does."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._pytree import tree_leaves

from harness.recipe import Recipe
from harness.training.step import Observer, Training

WEIGHTS, OPTIMIZER = "pytorch_model_fsdp.bin", "optimizer.pt"
"""Trainer's names of files: of the weights of a model that is divided among ranks, and of the optimizer's
state. Weights that are not divided have the names of transformers and peft."""
CANNOT_WRITE = (OSError, RuntimeError, SafetensorError)
"""What Python, torch and safetensors raise when the disk is full."""


@dataclass(frozen=True)
class Written:
    """How many bytes of tensors this process has written into files."""

    weights_bytes: int = 0
    optimizer_bytes: int = 0
    part: bool = False
    """Whether these are this rank's part, and the other ranks write the rest."""


def save_as_trainer(
    recipe: Recipe, training: Training, folder: Path, observer: Observer, *, whole: bool = False
) -> Written:
    """Write the model, or its adapter alone, and the optimizer's state into `folder`, in the phase "saving".

    Of several ranks, rank 0 writes. If the model is divided among them, every rank writes its own part
    (SHARDED_STATE_DICT of accelerate's FSDP plugin); or, if `whole`, all ranks gather one tensor after the
    other, and rank 0 keeps them in host memory until it writes (FULL_STATE_DICT).
    """
    with observer.phase("saving"):
        if recipe.fsdp or recipe.tensor_parallel:
            return _save_divided(recipe, training, folder, whole=whole)
        if training.ranks.mesh is not None and dist.get_rank():
            return Written()
        model: Any = training.model
        model.save_pretrained(folder)
        state = training.optimizer.state_dict()
        torch.save(state, folder / OPTIMIZER)
        return Written(sum(map(_tensor_bytes, folder.glob("*.safetensors"))), _storage_bytes(state))


def _save_divided(recipe: Recipe, training: Training, folder: Path, *, whole: bool) -> Written:
    """Write a model that is divided among ranks, as accelerate does (utils/fsdp_utils.py, save_fsdp_model and
    save_fsdp_optimizer)."""
    from torch.distributed.checkpoint import state_dict  # its import takes a second

    model, adapter = training.model, not recipe.trains_base
    options = state_dict.StateDictOptions(full_state_dict=whole, cpu_offload=whole)
    weights = state_dict.get_model_state_dict(model, options=replace(options, ignore_frozen_params=adapter))
    weights_bytes = _write_divided("model", weights, folder / WEIGHTS, whole=whole)
    del weights
    state = state_dict.get_optimizer_state_dict(model, training.optimizer, options=options)
    optimizer_bytes = _write_divided("optimizer", state, folder / OPTIMIZER, whole=whole)
    return Written(weights_bytes, optimizer_bytes, part=not whole)


def _write_divided(name: str, state: Any, path: Path, *, whole: bool) -> int:
    """Write `state`: all of it on rank 0, or each rank's part. The bytes of tensors that this rank has."""
    from torch.distributed import checkpoint

    if not whole:
        # each rank has a folder of its own, and accelerate's share one: the bytes are the same
        checkpoint.save({name: state}, storage_writer=checkpoint.FileSystemWriter(path))
        return sum(tensor.nbytes for tensor in _tensors(state))  # tied weights under each of their names
    if dist.get_rank() == 0:
        torch.save(state, path)
    return _storage_bytes(state)


def _tensor_bytes(path: Path) -> int:
    """Bytes of a safetensors file's tensors. Before them are 8 bytes, the header's length, and the header."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - header


def _storage_bytes(state: Any) -> int:
    """Bytes of the tensors in `state`, each storage once."""
    storages = (tensor.untyped_storage() for tensor in _tensors(state))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(state: Any) -> list[Tensor]:
    """The tensors in `state`; of a divided one this rank's part."""
    tensors: list[Any] = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
