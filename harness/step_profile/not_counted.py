"""What a process may take of a GPU beside what a profile counts, and when that decides whether it fits."""

from __future__ import annotations

from harness.step_profile.step_profile import StepProfile
from harness.units import in_gib

NCCL_COMMUNICATOR = (544_000_000, 1_600_000_000)
"""Bytes that NCCL takes for one communicator on each GPU, from and to: buffers of its channels, by links,
ranks and version. They lie beside PyTorch's allocator, which does not count them. Two ranks of A100 after one
all-reduce (github.com/NVIDIA/nccl/issues/964), and one communicator of eight GPUs (issues/864)."""
TIGHT = 0.02
"""Of a GPU's memory: with a smaller share to spare, what is not counted may decide. The share is a choice,
about half a GiB of 24."""
ALWAYS = "what CUDA's libraries load, ECC where it takes memory, a display"


def communicators(profile: StepProfile) -> int:
    """How many of NCCL's a rank has: one for each dimension of the recipe's mesh with several ranks, and one
    for a loop that is not ours on several ranks."""
    recipe = profile.recipe or {}
    sizes = [recipe.get(name) for name in ("dp_replicate", "dp_shard", "tp")]
    ours = sum(isinstance(size, int) and size > 1 for size in sizes)
    return ours or int(profile.ranks is not None and profile.ranks.world_size > 1)


def of_nccl(profile: StepProfile) -> str:
    """What NCCL takes, in words; empty for one process."""
    count = communicators(profile)
    low, high = (in_gib(count * size) for size in NCCL_COMMUNICATOR)
    each = f" for {count} communicators" if count > 1 else ""
    return f"NCCL's buffers ({low} to {high}{each})" if count else ""


def is_tight(profile: StepProfile, spare_bytes: int) -> bool:
    """Whether `spare_bytes` of the device's memory may go to what is not counted. A run that was measured has
    shown that they do not."""
    if profile.source == "measured":
        return False
    of_device = TIGHT * (profile.hardware.memory_bytes or 0)
    return spare_bytes < max(of_device, communicators(profile) * NCCL_COMMUNICATOR[1])
