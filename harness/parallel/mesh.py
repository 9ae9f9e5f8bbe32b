"""The ranks of a step: their mesh, which rows each one has, and the sums that they form on the host.

The group of all processes has gloo for tensors of the host, besides NCCL for those of GPUs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.errors import InputError
from harness.recipe import Recipe

# PyTorch 2.13's name for all_gather_into_tensor, which then warns
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
"""The mesh's dimensions, the fastest last: the ranks of one machine share layers first."""


@dataclass(frozen=True)
class Ranks:
    """The processes that run a step together, as one of them sees it."""

    mesh: DeviceMesh | None = None
    """Dimensions dp_replicate, dp_shard, tp; None in a process that runs alone."""
    data_rank: int = 0
    """Which of data_ranks shares of a batch's rows this rank has."""
    data_ranks: int = 1

    def shared(self, batch_tokens: int) -> float:
        """The number that this rank's losses are divided by, from the predicted tokens of its own rows.

        Engines average gradients over data_ranks ranks. The gradient of a batch is the sum over its tokens,
        divided by the number of all of them: so each rank divides by all tokens / data_ranks. In a process
        that runs alone that is its own number of tokens.
        """
        if self.mesh is None:
            return batch_tokens
        total = torch.tensor(batch_tokens, dtype=torch.int64)
        dist.all_reduce(total)  # the ranks of a tp group have counted the same rows
        return int(total) / dist.get_world_size()

    def averaged(self, loss: Tensor) -> float:
        """The loss of the whole step, from each rank's loss, which was divided by what `shared` gave."""
        if self.mesh is None:
            return float(loss)
        total = torch.tensor(float(loss), dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def padded(self, tensor: Tensor, value: int) -> Tensor:
        """`tensor` (rows, length, ...), padded with `value` to the length of the longest rank's: as
        accelerate does before it gathers (pad_across_processes), which allocates the padded tensor twice.
        """
        if self.mesh is None or tensor.is_meta:  # shape-only rows are of the same length on all ranks
            return tensor
        longest = torch.tensor(tensor.shape[1])
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        length = int(longest)
        if length == tensor.shape[1]:
            return tensor
        padded = tensor.new_zeros(len(tensor), length, *tensor.shape[2:]) + value
        padded[:, : tensor.shape[1]] = tensor
        return padded

    def gathered(self, tensor: Tensor) -> Tensor:
        """The rows of all data ranks, those of rank 0 first, on every rank, as accelerate's `gather` has
        them. `tensor` (rows, ...) has the same shape on all ranks.
        """
        if self.mesh is None or self.data_ranks == 1:
            return tensor
        for name in ("dp_shard", "dp_replicate"):
            if (ranks := self.mesh[name].size()) > 1:
                whole = tensor.new_empty(ranks * len(tensor), *tensor.shape[1:])
                _all_gather(whole, tensor.contiguous(), group=self.mesh.get_group(name))
                tensor = whole
        return tensor


ALONE = Ranks()
"""A process that runs a step by itself."""


def ranks_of(recipe: Recipe, device: torch.device) -> Ranks:
    """The mesh that `recipe` asks for, on the processes that torch.distributed has joined.

    Raises InputError where there are none, or not as many as the mesh has places.
    """
    if not recipe.distributed:
        return ALONE
    if not dist.is_initialized():
        raise InputError(
            "parallel: this process is no rank. Start the ranks with `harness run RECIPE --gpus N`, or with "
            "torchrun."
        )
    if dist.get_world_size() != recipe.world_size:
        raise InputError(
            f"parallel: the mesh of the recipe has {recipe.world_size} places, and "
            f"{dist.get_world_size()} processes have joined. Set sizes that multiply to that."
        )
    sizes = (recipe.dp_replicate, recipe.dp_shard, recipe.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    row, place, _ = mesh.get_coordinate() or (0, 0, 0)
    return Ranks(mesh, row * recipe.dp_shard + place, recipe.data_parallel_ranks)


GONE, LATE = "another rank is gone", "another rank did not come to a sum in time"


def lost_rank(message: str) -> str | None:
    """GONE or LATE if an error's message, of gloo or passed on by a rank, is about another rank that is gone
    or does not answer; None if it is not.
    """
    if (
        LATE in message
        or "Timed out waiting" in message
        or ("timeout" in message.lower() and "collective" in message.lower())
    ):
        return LATE
    gone = (GONE, "Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe")
    return GONE if any(part in message for part in gone) else None
