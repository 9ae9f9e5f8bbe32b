"""Checkpoints: all that a run needs to go on as if it had not been interrupted, bit for bit on a CPU.

A checkpoint (run_folder/checkpoint_files.py) holds the trained weights under the names peft and transformers
read (adapter_model.safetensors or model.safetensors, with their config), state.safetensors and state.json
(optimizer, scaler, random numbers, buffers, data position, step, recipe, versions), and recipe.yaml. No
pickle: reading one runs nothing. Frozen weights are not in it: they are built again, and a sample of them
tells whether they are the same.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from harness.checkpoint.divided import agreed, read_together, write_together
from harness.checkpoint.same_recipe import SavedState, content_of, refuse_another_recipe
from harness.checkpoint.tree import put_together, take_apart
from harness.errors import InputError, is_out_of_memory
from harness.observe import model_tensors
from harness.recipe import Recipe, recipe_yaml
from harness.run_folder import steps_done_of, verify, write_checkpoint
from harness.system import installed_versions, read_whole
from harness.training import Batches, Training, on_host, restore_state

SAMPLED = 256
"""How many elements of each frozen tensor are compared, evenly spaced."""
STATE = "state.json"
MAX_STATE_BYTES = 2**28
"""The largest state.json: it holds every loss of the run."""
TENSORS = "state.safetensors"
TENSORS_OF_RANK_0 = "rank-0.state"
"""A safetensors file too, with a name that torch.distributed.checkpoint does not take for one of its own."""
DIVIDED = "divided"
"""Stands for the digest of the frozen weights where no rank has them whole."""
MISFITS = (
    *(KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError, AssertionError),
    *(RuntimeError, OSError, SafetensorError, InputError),
)
"""What torch, numpy and safetensors raise for values that they did not write."""


class NotFiniteWeights(Exception):
    """A trained weight is nan or infinite: `names` says which, and no checkpoint was written."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


@dataclass(frozen=True)
class Saved:
    """A checkpoint read back, its files verified; `restore` puts it into a training."""

    path: Path
    state: SavedState


def save(
    folder: Path,
    recipe: Recipe,
    training: Training,
    batches: Batches,
    losses: list[float | None],
    device: torch.device,
) -> Path:
    """Write the checkpoint after `len(losses)` steps into `folder`. Returns its path.

    On several ranks each writes its part of weights and optimizer. Buffers are constants there, and every
    rank's random numbers are those of rank 0.

    Raises NotFiniteWeights, and writes nothing, where no run could go on from the weights, and InputError for
    a disk that is full.
    """
    model: Any = training.model
    divided = training.ranks.mesh is not None
    copies, wrong = dict[str, Tensor](), list[str]()
    for name, weight in _trained(model).items():
        here: Any = weight.to_local() if hasattr(weight, "to_local") else weight  # type: ignore[operator]
        copy = _on_cpu(here)  # copied first: looking for nan on the device would take memory there
        if not bool(copy.isfinite().all()):
            wrong.append(name)
        if not divided:
            copies[name] = copy
    if wrong := agreed(wrong) if divided else wrong:
        raise NotFiniteWeights(wrong)
    scaler = None if training.scaler is None else training.scaler.state_dict()
    tree = {"scaler": scaler, "random": _random_state(device)}
    if not divided:
        tree |= {"optimizer": training.optimizer.state_dict(), "buffers": dict(model.named_buffers())}
    document, tensors = take_apart(tree)
    state = SavedState(
        steps_done=len(losses),
        losses=losses,
        data=batches.state(),
        recipe=recipe.model_dump(mode="json"),
        content=content_of(recipe),
        frozen=DIVIDED if divided else _frozen_sample(model),
        versions=installed_versions(),
        state=document,
    )

    def write(beside: Path) -> None:
        _save_tensors(tensors, beside / (TENSORS_OF_RANK_0 if divided else TENSORS))
        (beside / STATE).write_text(state.model_dump_json())
        (beside / "recipe.yaml").write_text(recipe_yaml(recipe))
        if divided:
            return
        published = {_published_name(name, recipe): weight for name, weight in copies.items()}
        _save_tensors(published, beside / _weights_file(recipe))
        adapters = getattr(model, "peft_config", None)
        if adapters is not None:
            adapters["default"].save_pretrained(str(beside))
        else:
            (beside / "config.json").write_text(model.config.to_json_string())

    if divided:
        return write_together(folder, len(losses), training, write)
    return write_checkpoint(folder, len(losses), write)


def read(path: Path, recipe: Recipe) -> Saved:
    """Verify the checkpoint at `path`, and that `recipe` is the one it was written with.

    Raises InputError naming the file that is not as it was written, or the field that differs.
    """
    verify(path)
    try:
        state = SavedState.model_validate_json(read_whole(path / STATE, MAX_STATE_BYTES))
    except (OSError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": error}
        where = " ".join(map(str, first["loc"]))
        raise InputError(
            f"--resume: {path / STATE} is not what this version of harness writes ({where}: {first['msg']})."
        ) from None
    if state.steps_done != steps_done_of(path):
        raise InputError(f"--resume: {path / STATE} is of step {state.steps_done}. Remove that checkpoint.")
    refuse_another_recipe(path, state, recipe)
    return Saved(path, state)


def restore(saved: Saved, recipe: Recipe, training: Training, batches: Batches, device: torch.device) -> None:
    """Put everything saved into what `set_up` (training/loop.py) has just built from the same recipe.

    Raises InputError if the frozen weights are not those that the run began with.
    """
    divided = training.ranks.mesh is not None
    if divided:
        with _fitting(saved.path) as path:
            read_together(path, training)
    else:
        if saved.state.frozen != _frozen_sample(training.model):
            raise InputError(
                f"--resume: {saved.path}: model: the frozen weights of {recipe.model} are not those the run "
                f"began with (made by torch {saved.state.versions.get('torch')}, now it is "
                f"{torch.__version__}). Resume with the same checkpoint and versions, on the same kind of "
                "device."
            )
        names = {name: _published_name(name, recipe) for name in _trained(training.model)}
        with _fitting(saved.path / _weights_file(recipe)) as path:
            _restore_weights(training, names, load_file(path))
    with _fitting(saved.path / (TENSORS_OF_RANK_0 if divided else TENSORS)) as path:
        tensors = load_file(path)
    with _fitting(saved.path / STATE):
        state: Any = put_together(saved.state.state, tensors)
        if not divided:
            _restore_whole_state(state, recipe, training)
        if training.scaler is not None:
            training.scaler.load_state_dict(state["scaler"])
        _set_random_state(state["random"], device)
        batches.load_state(saved.state.data)


@contextmanager
def _fitting(path: Path) -> Iterator[Path]:
    """Inside, `path`'s content is put into what the recipe builds; InputError names it if they do not fit."""
    try:
        yield path
    except MISFITS as error:
        if is_out_of_memory(error):
            raise
        what = str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        raise InputError(
            f"--resume: {path} does not fit what the recipe builds ({what}). "
            "Was it written by another version of harness or of its libraries?"
        ) from error


@torch.no_grad()
def _restore_weights(training: Training, names: dict[str, str], published: dict[str, Tensor]) -> None:
    if set(names.values()) != set(published):
        raise ValueError("other weights are trained")
    for name, weight in _trained(training.model).items():
        weight.copy_(_of_same_shape(published[names[name]], weight, name))


@torch.no_grad()
def _restore_whole_state(state: Any, recipe: Recipe, training: Training) -> None:
    """Put back what one process has whole: buffers, and the optimizer's state."""
    buffers = dict(training.model.named_buffers())
    for name, buffer in state["buffers"].items():
        buffers[name].copy_(_of_same_shape(buffer, buffers[name], name))
    with on_host() if recipe.optimizer_on_host else nullcontext():
        restore_state(training.optimizer, state["optimizer"])


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _of_same_shape(saved: Tensor, own: Tensor, name: str) -> Tensor:
    if (saved.shape, saved.dtype) != (own.shape, own.dtype):  # copy_ would broadcast and cast
        raise ValueError(f"{name} is {saved.dtype} {list(saved.shape)}, not {own.dtype} {list(own.shape)}")
    return saved


def _weights_file(recipe: Recipe) -> str:
    return "model.safetensors" if recipe.trains_base else "adapter_model.safetensors"


def _published_name(name: str, recipe: Recipe) -> str:
    """The name of a weight in the file, as peft writes it: without the adapter's name, which is `default`."""
    return name if recipe.trains_base else re.sub(r"\.default(?=\.|$)", "", name)


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk
        raise OSError(str(error)) from None


def _random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator that a step may draw from."""
    name, keys, *rest = np.random.get_state()
    state: dict[str, Any] = {
        "cpu": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], *rest),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


def _frozen_sample(model: nn.Module) -> str:
    """A digest of SAMPLED elements of every frozen weight and of its quantization scales.

    It does not depend on the tensors' order, and equal ones count once: bitsandbytes moves its tensors around
    in the first forward pass.
    """
    others = {id(t) for t in [*_trained(model).values(), *model.buffers()]}
    digests = set()
    for tensor in model_tensors(model):
        if id(tensor) not in others:
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().contiguous()
            content = sample.view(torch.uint8).numpy().tobytes()
            digests.add(hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + content).digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()
