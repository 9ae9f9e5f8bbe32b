"""Memory and communication of a GPU under data and model parallelism. No torch.

DDP, FSDP2 and tensor parallelism are napkin's own answer for the recipe on so many ranks
(harness/napkin/ranks). ZeRO-1, 2 and 3 are DeepSpeed's: its paper's splits of the model states (Rajbhandari
et al., arXiv 1910.02054) and, beside them, the buffers that its configuration documents. Model parallelism is
the blocks divided, one GPU after the other. What is sent is counted with ring collectives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.fit.deepspeed import zero_buffers
from harness.napkin import Memory, Moment, Timing, estimate, ring, traffic
from harness.recipe import check_recipe
from harness.units import in_gib

STRATEGIES = (
    "model parallel",
    "tensor parallel",
    "DDP",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-3",
    "FSDP2",
    "hybrid sharding",
)
GPUS_PER_NODE = 8
ALONE: dict[str, Any] = {
    "parallel": "none",
    "dp_replicate": 1,
    "dp_shard": 1,
    "tp": 1,
    "reshard_after_forward": True,
    "reduce_dtype": None,
    "sync_each_micro_batch": True,
    "wrap": "block",
    "cpu_offload": False,
}
"""The fields of a recipe that say how it is divided, as one GPU has them."""


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
    where: str = ""
    """What the step does at its peak."""
    buffers: str = ""
    """DeepSpeed's buffers in `peak_bytes`, with their formula."""


@dataclass(frozen=True)
class Refused:
    """A strategy that the recipe cannot have."""

    strategy: str
    reason: str


def model_states(strategy: str, whole: States, gpus: int) -> States:
    """What one of `gpus` GPUs holds of the `whole` states (arXiv 1910.02054, figure 1).

    ZeRO-1 divides the optimizer states, ZeRO-2 the gradients as well, ZeRO-3 the parameters too.
    """
    divided = {"ZeRO-1": (1, 1, gpus), "ZeRO-2": (1, gpus, gpus)}.get(strategy, (gpus, gpus, gpus))
    return States(whole.parameters / divided[0], whole.gradients / divided[1], whole.optimizer / divided[2])


def strategies(memory: Memory, gpus: int, group: int = GPUS_PER_NODE) -> list[Sharded | Refused]:
    """Every strategy on `gpus` GPUs, each with its own micro batch (model and tensor parallel: sharing one);
    or why the recipe cannot have it. A recipe that says how it is divided says so for the strategies that
    divide it so.

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
    group = min(group, gpus)
    given = recipe.model_dump()
    alone = estimate(check_recipe(given | ALONE, "shard"), memory.sizes.hardware, memory.sizes.built.whole)
    of_fsdp = given if recipe.fsdp else given | ALONE
    ddp = recipe.distributed and not (recipe.fsdp or recipe.tensor_parallel)
    of_ddp = given if ddp else given | ALONE
    of_tp = given if recipe.tensor_parallel and not recipe.fsdp else given | ALONE
    ranks = {
        "tensor parallel": of_tp | {"parallel": "tp", "tp": gpus},
        "DDP": of_ddp | {"parallel": "ddp", "dp_replicate": gpus},
        "FSDP2": of_fsdp | {"parallel": "fsdp", "dp_replicate": 1, "dp_shard": gpus, "tp": 1},
        "hybrid sharding": of_fsdp
        | {"parallel": "fsdp", "dp_replicate": gpus // group, "dp_shard": group, "tp": 1},
    }
    rows: list[Sharded | Refused] = []
    for strategy in STRATEGIES:
        if strategy not in ranks:
            rows.append(_by_states(alone, strategy, gpus))
            continue
        try:
            rows.append(_by_napkin(alone, strategy, ranks[strategy]))
        except InputError as error:
            rows.append(Refused(strategy, str(error).removeprefix(f"{strategy}: ")))
    return rows


def bucket_note(rows: Iterable[Sharded | Refused]) -> str:
    """A sentence about DDP's second copy of the gradients; empty where there is no DDP."""
    for row in rows:
        if isinstance(row, Sharded) and row.num_buckets:
            return (
                f"DDP's peak holds its {row.num_buckets} buckets, a second copy of the gradients: "
                f"{in_gib(int(row.bucket_bytes))} that gradient_as_bucket_view=True does without"
            )
    return ""


def _by_napkin(alone: Memory, strategy: str, fields: dict[str, Any]) -> Sharded:
    """The recipe on so many ranks of PyTorch's engines."""
    recipe = check_recipe(fields, strategy)
    rank = estimate(recipe, alone.sizes.hardware, alone.sizes.built.whole)
    sizes = rank.sizes
    phases = Timing(sizes).phases.values()
    return Sharded(
        strategy,
        States(sizes.parameter_bytes, sizes.gradient_bytes, sizes.device_state),
        rank.peak.total_bytes,
        sum(sent.sent for of_phase in traffic(sizes).values() for sent in of_phase),
        sum(phase.sent_s for phase in phases),
        sum(phase.exposed_s for phase in phases),
        OVERLAP[strategy],
        sizes.bucket_bytes,
        len(sizes.buckets),
        rank.peak.where,
    )


def _by_states(memory: Memory, strategy: str, gpus: int) -> Sharded:
    """What the states divided come to, with DeepSpeed's buffers."""
    sizes = memory.sizes
    whole = States(sizes.parameter_bytes, sizes.gradient_bytes, sizes.device_state)
    states = model_states(strategy, whole, gpus)
    buffers = zero_buffers(sizes, strategy) if gpus > 1 else []
    held = sum(buffer.size_bytes for buffer in buffers)
    peak = held + max(_at(moment, strategy, states, whole, gpus) for moment in memory.moments[1:])
    sent, exposed = _traffic(memory, strategy, gpus)
    link = sizes.hardware.datasheet.gpu_link.value
    exposed_s = exposed / link + max(0.0, (sent - exposed) / link - _hidden_s(memory, strategy))
    formula = "; ".join(f"{buffer.name} {buffer.formula}" for buffer in buffers)
    return Sharded(strategy, states, peak, sent, sent / link, exposed_s, OVERLAP[strategy], buffers=formula)


def _hidden_s(memory: Memory, strategy: str) -> float:
    """Seconds of computing under which a strategy sends. Gradients are complete, and leave, in the backward
    of the step's last micro batch; sharded parameters are gathered in every forward and backward."""
    computing = Timing(memory.sizes).phases
    forward_s, backward_s = computing["forward"].seconds, computing["backward"].seconds
    if strategy in ("ZeRO-1", "ZeRO-2"):
        return backward_s / memory.sizes.recipe.gradient_accumulation_steps
    return forward_s + backward_s


def _at(moment: Moment, strategy: str, states: States, whole: States, gpus: int) -> float:
    """A moment of the step with the states divided."""
    share = states.gradients / whole.gradients if whole.gradients else 1.0
    held = states.parameters + moment.gradients * share + states.optimizer
    own = moment.activations + moment.temporaries
    if moment.phase == "optimizer_step":  # temporaries are as large as what a GPU steps
        stepped = states.optimizer / whole.optimizer if whole.optimizer else share
        own = moment.activations + moment.temporaries * stepped
    if strategy == "model parallel":
        own /= gpus
    return held + own + moment.inputs + moment.other


def _traffic(memory: Memory, strategy: str, gpus: int) -> tuple[float, float]:
    """Bytes a GPU sends in one step, and how many of them nothing can hide.

    ZeRO-1 and 2: a reduce-scatter of the gradients, and an all-gather of the updated parameters after the
    step. ZeRO-3: an all-gather of all parameters in forward and again in backward, for every micro batch, and
    a reduce-scatter of the gradients: 1.5 times DDP. Model parallel: the residual stream at each border,
    forward and back.
    """
    sizes = memory.sizes
    micro = sizes.recipe.gradient_accumulation_steps
    gradients, everything = sizes.gradient_bytes, sizes.parameter_bytes
    trained = gradients  # updated weights have the gradients' size
    if strategy == "model parallel":
        stream = sizes.stages.loss.entering
        border = 2 * micro * (stream.size_bytes if stream else 0) if gpus > 1 else 0
        return border, border
    if strategy in ("ZeRO-1", "ZeRO-2"):
        return ring(gpus) * (gradients + trained), ring(gpus) * trained
    return ring(gpus) * (2 * micro * everything + gradients * micro), 0.0


OVERLAP = {
    "model parallel": "nothing: GPUs wait for each other; with k micro batches a share (N-1)/(k+N-1) is idle",
    "tensor parallel": "nothing: the next layer waits for each sum; GPUs share one micro batch",
    "DDP": "the all-reduce runs under backward, bucket by bucket; the last bucket shows",
    "ZeRO-1": "the reduce-scatter runs under backward; the all-gather after the step does not",
    "ZeRO-2": "the reduce-scatter runs under backward; the all-gather after the step does not",
    "ZeRO-3": "the next layers' all-gather runs under these layers' compute",
    "FSDP2": "the next unit's all-gather runs under this one's compute; the first shows, and the last sum",
    "hybrid sharding": "as FSDP2 on the fast links of a group; the sum across groups under backward",
}
