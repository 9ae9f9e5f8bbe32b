"""Which of several ranks this process is, by torch.distributed, or by the variables that torchrun sets."""

from __future__ import annotations

import os
from pathlib import Path

from harness.run_folder import folder_of_rank


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) for a process of its own."""
    import torch

    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)


def own_folder(run: Path) -> Path:
    """`run`; of one rank of several its folder in it."""
    rank, world_size = rank_and_world_size()
    return folder_of_rank(run, rank) if world_size > 1 else run
