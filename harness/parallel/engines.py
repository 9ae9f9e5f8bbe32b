"""The toggle `parallel`: which engine divides a model, and when gradients are summed over ranks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.parallel.deferred import Deferred, Make
from harness.parallel.mesh import Ranks
from harness.recipe import Recipe

Summing = Callable[[bool], AbstractContextManager[Any]]
"""Gives a context for one micro batch's forward and backward, by whether it is the last one of the step."""


def divide(
    recipe: Recipe, model: nn.Module, ranks: Ranks, device: torch.device, deferred: Deferred | None = None
) -> nn.Module:
    """Divide `model`, which is on `device` or still `deferred`, among `ranks`, in place. Returns the module
    that a step calls: the model, or DDP around it.

    Raises InputError for a model that cannot be divided in this way.
    """
    mesh = ranks.mesh
    if mesh is None:
        return model
    make: Make = (lambda modules: None) if deferred is None else deferred.maker(model)
    if recipe.tensor_parallel:
        from harness.parallel.layers import divided_layers  # what FSDP2 and DTensor import takes a second

        make = divided_layers(recipe, model, mesh["tp"], make)
    if recipe.fsdp:
        from harness.parallel.units import shard_units

        # the dimension that FSDP2 divides over; two if each part has replicas (hybrid sharding)
        data_mesh = mesh["dp_replicate", "dp_shard"] if recipe.dp_replicate > 1 else mesh["dp_shard"]
        shard_units(recipe, model, data_mesh, device, make)
    elif recipe.tensor_parallel:
        make([model])
    if recipe.ddp:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp_replicate"))
    return model


def summed_at_the_end(recipe: Recipe, model: nn.Module) -> Summing:
    """Contexts in which gradients are summed over ranks in the last micro batch only; with
    sync_each_micro_batch, in every one."""
    if recipe.sync_each_micro_batch:
        return lambda last: nullcontext()
    if isinstance(model, DistributedDataParallel):
        return lambda last: nullcontext() if last else model.no_sync()

    @contextmanager
    def fsdp(last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]  (fully_shard made it an FSDPModule)
        yield

    return fsdp
