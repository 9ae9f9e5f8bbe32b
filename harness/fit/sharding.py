"""Memory and communication a GPU under data and model parallelism. No torch.

The model states and their splits are ZeRO's (Rajbhandari et al., arXiv 1910.02054): parameters, gradients
and optimizer states, each replicated or divided by the number of GPUs. Volumes are bytes a GPU sends in one
optimizer step, with ring collectives: an all-gather or reduce-scatter of M bytes over N GPUs sends
M (N - 1) / N, and an all-reduce is one of each.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.errors import InputError
from harness.napkin import Memory, Moment, Sizes, Timing, Weight
from harness.units import in_gib

STRATEGIES = ("model parallel", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3 / FSDP", "hybrid sharding")
GPUS_PER_NODE = 8
FIRST_BUCKET_BYTES = 2**20
"""torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: small, so that communication starts early."""
BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's bucket_cap_mb, its default."""
ROUNDING_BYTES = 512
"""The CUDA caching allocator's."""


@dataclass(frozen=True)
class States:
    """Bytes of the model states one GPU holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total_bytes(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Sharded:
    """One strategy on N GPUs."""

    strategy: str
    states: States
    peak_bytes: float
    """Model states, activations and temporaries of a GPU at its peak."""
    sent_bytes: float
    """Sent by a GPU in one optimizer step."""
    link_s: float
    """Time of that at the datasheet's GPU-to-GPU rate."""
    exposed_s: float
    """The part that computing cannot hide."""
    overlap: str
    bucket_bytes: float = 0.0
    """DDP's second copy of the gradients, in `peak_bytes`."""
    num_buckets: int = 0


def model_states(strategy: str, whole: States, gpus: int, group: int = GPUS_PER_NODE) -> States:
    """What one of `gpus` GPUs holds of the `whole` states (arXiv 1910.02054, figure 1).

    ZeRO-1 divides the optimizer states, ZeRO-2 the gradients as well, ZeRO-3 the parameters too. Hybrid
    sharding divides all three within a `group` and replicates them across groups.
    """
    parts = min(group, gpus) if strategy == "hybrid sharding" else gpus
    divided = {
        "DDP": (1, 1, 1),
        "ZeRO-1": (1, 1, parts),
        "ZeRO-2": (1, parts, parts),
        "ZeRO-3 / FSDP": (parts, parts, parts),
        "hybrid sharding": (parts, parts, parts),
        "model parallel": (parts, parts, parts),
    }[strategy]
    return States(whole.parameters / divided[0], whole.gradients / divided[1], whole.optimizer / divided[2])


def shard(memory: Memory, gpus: int, group: int = GPUS_PER_NODE) -> list[Sharded]:
    """Every strategy on `gpus` GPUs, each with its own micro batch (model parallel: sharing one).

    Raises InputError unless gpus is at least 1, and for offloaded or in-backward optimizers, whose states
    are not where these strategies divide them.
    """
    recipe = memory.sizes.recipe
    if gpus < 1 or group < 1:
        raise InputError(f"--gpus {gpus}: it must be at least 1.")
    if gpus > group and gpus % group:
        raise InputError(f"--gpus {gpus}: hybrid sharding needs whole groups of {group}; set --group.")
    if recipe.offload or recipe.optimizer_in_backward:
        raise InputError(
            "offload and optimizer_in_backward are for one GPU: sharding divides what they move away. "
            "Set offload: [] and optimizer_in_backward: false."
        )
    return [_sharded(memory, strategy, gpus, min(group, gpus)) for strategy in STRATEGIES]


def ddp_buckets(weights: Iterable[Weight]) -> list[int]:
    """Bytes of the buckets into which DDP's reducer copies gradients, in the order in which they are sent;
    `weights` are in the order of the forward pass.

    With gradient_as_bucket_view=False, the default, buckets are tensors of their own that live as long as the
    model: each gradient is copied in, reduced, and copied back. From the second step on they are filled in
    the order in which gradients arrive, each closed when it has reached its limit: 1 MiB for the first of a
    dtype, 25 MiB for the others (torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size).
    """
    closed: list[int] = []
    filling: dict[str, int] = {}
    limits: dict[str, int] = {}
    for weight in reversed(list(weights)):
        for _ in range(weight.count):
            size = filling.get(weight.dtype, 0) + weight.size_bytes
            if size >= limits.get(weight.dtype, FIRST_BUCKET_BYTES):
                closed.append(size)
                limits[weight.dtype], size = BUCKET_BYTES, 0
            filling[weight.dtype] = size
    return closed + [size for size in filling.values() if size]


def _in_forward_order(sizes: Sizes) -> list[Weight]:
    """The trained weights, each block's together: embeddings, blocks, and what comes after them."""
    shape = sizes.built.shape
    first = [w for w in sizes.outer if "embed" in w.name]
    blocks = [replace(w, count=1) for _ in range(shape.layers) for w in sizes.in_blocks]
    last = [w for w in reversed(sizes.outer) if w not in first]  # the norm comes before the head
    return [w for w in (*first, *blocks, *last) if w.trained]


def bucket_note(rows: Iterable[Sharded]) -> str:
    """A sentence about DDP's second copy of the gradients."""
    ddp = next(row for row in rows if row.strategy == "DDP")
    return (
        f"DDP's peak holds its {ddp.num_buckets} buckets, a second copy of the gradients: "
        f"{in_gib(int(ddp.bucket_bytes))} that gradient_as_bucket_view=True does without"
    )


def _sharded(memory: Memory, strategy: str, gpus: int, group: int) -> Sharded:
    sizes = memory.sizes
    whole = States(sizes.parameter_bytes, sizes.gradient_bytes, sizes.device_state)
    states = model_states(strategy, whole, gpus, group)
    buckets = ddp_buckets(_in_forward_order(sizes)) if strategy == "DDP" else []
    copied = sum(-(-size // ROUNDING_BYTES) * ROUNDING_BYTES for size in buckets)
    peak = copied + max(_at(memory, s, strategy, states, whole, gpus) for s in memory.moments[1:])
    sent, exposed = _traffic(memory, strategy, gpus, group)
    if buckets:  # the last one has no backward left to hide under
        exposed = 2 * _ring(gpus) * buckets[-1]
    link = sizes.hardware.datasheet.gpu_link.value
    exposed_s = exposed / link + max(0.0, (sent - exposed) / link - _hidden_s(memory, strategy))
    return Sharded(
        strategy, states, peak, sent, sent / link, exposed_s, OVERLAP[strategy], copied, len(buckets)
    )


def _hidden_s(memory: Memory, strategy: str) -> float:
    """Seconds of computing under which a strategy sends. Gradients are complete, and leave, in the backward
    of the step's last micro batch; sharded parameters are gathered in every forward and backward."""
    computing = Timing(memory.sizes).phases
    forward_s, backward_s = computing["forward"].seconds, computing["backward"].seconds
    if strategy in ("DDP", "ZeRO-1", "ZeRO-2"):
        return backward_s / memory.sizes.recipe.gradient_accumulation_steps
    return forward_s + backward_s


def _at(memory: Memory, moment: Moment, strategy: str, states: States, whole: States, gpus: int) -> float:
    """A moment of the step with the states divided. Sharded parameters are whole while they are used: the
    weights outside the blocks, and two blocks (the one in use and the next)."""
    sizes = memory.sizes
    share = states.gradients / whole.gradients if whole.gradients else 1.0
    held = states.parameters + moment.gradients * share + states.optimizer
    own = moment.activations + moment.temporaries
    if moment.phase == "optimizer_step":  # temporaries are as large as what a GPU steps
        stepped = states.optimizer / whole.optimizer if whole.optimizer else share
        own = moment.activations + moment.temporaries * stepped
    if strategy == "model parallel":
        own /= gpus
    elif states.parameters < whole.parameters and moment.phase != "optimizer_step":
        block = sum(w.size_bytes for w in sizes.in_blocks)
        held += sum(w.total_bytes for w in sizes.outer) + 2 * block
        # a block's gradients are whole until they are reduced and scattered
        held += sum(w.size_bytes for w in sizes.in_blocks if w.trained)
    return held + own + moment.inputs + moment.other


def _traffic(memory: Memory, strategy: str, gpus: int, group: int) -> tuple[float, float]:
    """Bytes a GPU sends in one step, and how many of them nothing can hide.

    DDP: an all-reduce of the gradients. ZeRO-1 and 2: a reduce-scatter of them, and an all-gather of the
    updated parameters after the step. ZeRO-3: an all-gather of all parameters in forward and again in
    backward, for every micro batch, and a reduce-scatter of the gradients: 1.5 times DDP. Hybrid: that
    within a group, and an all-reduce of a group's gradient shard across groups. Model parallel: the
    residual stream at each border, forward and back.
    """
    sizes = memory.sizes
    micro = sizes.recipe.gradient_accumulation_steps
    gradients, everything = sizes.gradient_bytes, sizes.parameter_bytes
    trained = gradients  # updated weights have the gradients' size
    if strategy == "model parallel":
        stream = sizes.stages.loss.entering
        border = 2 * micro * (stream.size_bytes if stream else 0) if gpus > 1 else 0
        return border, border
    if strategy == "hybrid sharding":
        ring, groups = _ring(group), gpus // group
        across = 2 * _ring(groups) * gradients / group
        return ring * (2 * micro * everything + gradients * micro) + across, 0.0
    ring = _ring(gpus)
    if strategy == "DDP":
        return 2 * ring * gradients, 0.0
    if strategy in ("ZeRO-1", "ZeRO-2"):
        return ring * (gradients + trained), ring * trained
    return ring * (2 * micro * everything + gradients * micro), 0.0


def _ring(gpus: int) -> float:
    """Share of a buffer that each of `gpus` GPUs sends in a ring all-gather or reduce-scatter."""
    return (gpus - 1) / gpus


OVERLAP = {
    "model parallel": "nothing: GPUs wait for each other; with k micro batches a share (N-1)/(k+N-1) is idle",
    "DDP": "the all-reduce runs under backward, bucket by bucket; the last bucket shows",
    "ZeRO-1": "the reduce-scatter runs under backward; the all-gather after the step does not",
    "ZeRO-2": "the reduce-scatter runs under backward; the all-gather after the step does not",
    "ZeRO-3 / FSDP": "the next block's all-gather runs under this block's compute; the first one shows",
    "hybrid sharding": "as ZeRO-3 on the fast links of a group; the all-reduce across groups under backward",
}
