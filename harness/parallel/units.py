"""FSDP2: which layers are gathered together, in what dtype, and where their parts are kept.

A unit is what one `fully_shard` call covers: its weights are gathered by one all-gather before it runs, and
its gradients are summed and divided by one reduce-scatter. The layout decides how much of the model is whole
at a time.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from harness.errors import CannotDivide, InputError
from harness.parallel.deferred import Make
from harness.parallel.dtypes import DTYPES
from harness.recipe import Recipe
from harness.system import TorchRelease


def shard_units(recipe: Recipe, model: nn.Module, mesh: DeviceMesh, device: torch.device, make: Make) -> None:
    """Divide the weights of `model` among the ranks of `mesh`, unit by unit, the model itself last.

    Each unit is made just before it is divided: one unit is whole at a time, besides the parts of those
    before it. The last unit takes what no other has. PyTorch keeps it gathered from its forward to its
    backward.

    Raises CannotDivide for a model without blocks and for weights that this PyTorch cannot divide, and
    InputError for cpu_offload without a GPU.
    """
    if recipe.cpu_offload and device.type == "cpu":
        raise InputError("cpu_offload: there is no GPU here to take the weights off. Set cpu_offload: false.")
    how: dict[str, Any] = {
        "mesh": mesh,
        # with a mixed precision the parts are fp32 and are gathered in the dtype of the products, as
        # autocast casts them in one process, weight by weight
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=DTYPES[recipe.compute_dtype] if recipe.mixed else None,
            reduce_dtype=None if recipe.reduce_dtype is None else DTYPES[recipe.reduce_dtype],
        ),
        "offload_policy": CPUOffloadPolicy() if recipe.cpu_offload else OffloadPolicy(),
    }
    layout = {"block": _blocks, "accelerate": _as_accelerate, "transformers": _as_transformers}[recipe.wrap]
    for unit, stays_gathered in list(
        layout(model)
    ):  # found before any is made: tied weights are the same objects
        modules = unit if isinstance(unit, list) else [unit]
        make(modules)
        _refuse_integers(modules)
        reshard = recipe.reshard_after_forward and not stays_gathered
        fully_shard(unit, reshard_after_forward=reshard, **how)
    make([model])
    fully_shard(model, **how)


def _refuse_integers(modules: list[nn.Module]) -> None:
    """Raise CannotDivide for weights of integers if this PyTorch cannot divide them: bitsandbytes stores the
    experts of a mixture as bytes, whatever the other weights are stored as."""
    if TorchRelease.of(torch.__version__).fsdp_divides_integers:
        return
    for module in modules:
        for name, weight in module.named_parameters():
            if not weight.is_floating_point():
                raise CannotDivide(
                    f"parallel: FSDP2 of PyTorch {torch.__version__} divides no weights of integers, and the "
                    f"experts in 4 bit ({name}) are some. Install PyTorch 2.12 or a later release, or set "
                    "quantization: none."
                )


Unit = nn.Module | list[nn.Module]
"""A module, or modules that one `fully_shard` covers. Layouts yield each with whether it stays gathered."""


def _blocks(model: nn.Module) -> Iterator[tuple[Unit, bool]]:
    """Every decoder block is a unit; embeddings, last norm and head stay with the model."""
    found = [block for blocks in blocks_of(model) for block in blocks]
    if not found:
        raise CannotDivide("parallel: fsdp gathers one transformer block at a time, and this model has none.")
    yield from ((block, False) for block in found)


def blocks_of(model: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost nn.ModuleLists: a transformer's blocks."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from blocks_of(child)


def _as_accelerate(model: Any) -> Iterator[tuple[Unit, bool]]:
    """accelerate's fsdp2_prepare_model (utils/fsdp_utils.py, 1.15) with TRANSFORMER_BASED_WRAP: blocks by the
    class names of _no_split_modules, the embedding, and last norm and head as one unit that stays gathered.

    The norm is looked for by its class name, next to the blocks. Where an adapter wraps the model, accelerate
    finds none there, and the norm stays with the model.
    """
    names = set(model._no_split_modules or ())
    yield from ((module, False) for module in model.modules() if type(module).__name__ in names)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and embedding.weight is head.weight
    if not tied:
        yield embedding, False
    holder = getattr(model, getattr(model, "base_model_prefix", "") or "", model)
    norms = [child for child in holder.children() if "Norm" in type(child).__name__]
    tail = [*norms[-1:], *([embedding] if tied else []), *([head] if head is not None else [])]
    if tail:
        yield tail, True


def without_adapter(model: Any) -> Any:
    """transformers' model within peft's, or `model` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _as_transformers(model: Any) -> Iterator[tuple[Unit, bool]]:
    """transformers' apply_fully_sharded_data_parallelism (distributed/fsdp.py, 5.23), by the model's own
    fsdp_plan: blocks, embedding, and last norm and head as one unit that stays gathered."""
    base = without_adapter(model)
    modules = dict(base.named_modules())
    name_of = {module: name for name, module in modules.items()}
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    plan = dict(base.fsdp_plan)
    tied = head is not None and embedding.weight is head.weight
    if tied and name_of[head] in plan:
        plan[name_of[embedding]] = plan.pop(name_of[head])
    styles = {name: plan.get(re.sub(r"\d+", "*", name)) for name in modules}
    for name, style in styles.items():
        if style == "free_full_weight":
            yield modules[name], False
    kept = [modules[name] for name, style in styles.items() if style == "keep_full_weight"]
    norm_and_head = len(kept) == 2 and any(module in (embedding, head) for module in kept)
    if norm_and_head and any(name_of[module].endswith("norm") for module in kept):
        if head is not None and tied:  # transformers ties it again when all is divided
            kept.append(head)
        yield kept, True
    else:
        yield from ((module, True) for module in kept)
