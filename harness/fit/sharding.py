"""Memory and communication of a GPU under data and model parallelism. No torch if the cache has the answer.

DDP, FSDP2, hybrid sharding and tensor parallelism are PyTorch's own engines: their peak, and what the step
waits for, are simulated for rank 0 of the recipe (harness/fit/simulations.py), or estimated by napkin where
that is not possible. ZeRO-1, 2 and 3 are DeepSpeed's: the splits of the model states are its paper's
(Rajbhandari et al., arXiv 1910.02054), with the buffers that its configuration documents on top. Model
parallelism divides the blocks among the GPUs, which work one after the other. For every strategy the states
that a GPU holds and what it sends are the textbook's, and traffic is counted with ring collectives.

The sizes of DeepSpeed's buffers are in elements of the gradients' or weights' dtype (DeepSpeed@1b88ac3,
runtime/zero/config.py: the defaults and what each limits). stage_1_and_2.py makes a bucket before each
backward, and a second one with overlap_comm, which is off by default below stage 3; stage3.py keeps one from
the start, and releases gathered parameters when more than stage3_max_live_parameters are live.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

from harness.errors import CannotDivide, InputError
from harness.fit.simulations import Simulations, all_at_once
from harness.hardware import GPUS_PER_NODE, Hardware, sent_share
from harness.napkin import Memory, Moment, estimate, sent_byte_s, step_time
from harness.recipe import Recipe, check_recipe
from harness.system import collected_by_hand
from harness.units import in_gib

REDUCE_BUCKET_SIZE = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
PREFETCH_BUCKET_SIZE = 50_000_000


class Buffer(NamedTuple):
    """A buffer that DeepSpeed keeps on the device."""

    name: str
    formula: str
    """How its bytes are computed, for a reader."""
    size_bytes: int


def zero_buffers(memory: Memory, strategy: str) -> list[Buffer]:
    """The buffers of a ZeRO stage with DeepSpeed's default settings, which are alive at the same time in
    backward; none for other strategies."""
    if strategy not in ("ZeRO-1", "ZeRO-2", "ZeRO-3"):
        return []
    trained = sum(w.elements * w.count for w in memory.trained)
    of_gradient = memory.gradient_bytes // trained if trained else 0
    bucket = Buffer(
        "reduce_bucket_size", f"{REDUCE_BUCKET_SIZE:,} × {of_gradient} B", REDUCE_BUCKET_SIZE * of_gradient
    )
    if strategy != "ZeRO-3":
        return [bucket]
    weights = [*memory.built.outer, *memory.built.in_blocks]
    elements = sum(w.elements * w.count for w in weights)
    of_weight = sum(w.total_bytes for w in weights) / elements
    live = min(elements, MAX_LIVE_PARAMETERS + PREFETCH_BUCKET_SIZE)
    limit = f"stage3_max_live_parameters + prefetch = {MAX_LIVE_PARAMETERS + PREFETCH_BUCKET_SIZE:,}"
    at_most = f"min({elements:,}, {limit}) × {of_weight:.3g} B"
    return [bucket, Buffer("live parameters", at_most, int(live * of_weight))]


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
BUCKET_BYTES = 25 * 2**20
"""DDP's default bucket of gradients."""
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
"""The recipe fields that say how it is divided, with the values that a single GPU has."""


@dataclass(frozen=True)
class States:
    """The bytes of the model states that one GPU holds."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total_bytes(self) -> float:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Sharded:
    """What one GPU holds, sends and waits for under one strategy."""

    strategy: str
    states: States
    peak_bytes: float
    """Model states, activations and temporaries of a GPU at its peak, as PyTorch's allocator counts them."""
    sent_bytes: float
    """The bytes that a GPU sends in one optimizer step."""
    link_s: float
    """The time to send them in large collectives."""
    exposed_s: float
    """The communication that no computation hides, which the step waits for. A simulation also counts the
    waits for collectives that begin late or are small; it can be more than `link_s`."""
    overlap: str
    """A clause about what communication runs under computation."""
    fits: bool
    """Whether the step fits the memory of a GPU with the CUDA context: in a simulated allocator, or where it
    was not simulated by arithmetic, the peak and the context."""
    tokens_per_s: float | None = None
    """The simulated speed of all GPUs together; None where it was not simulated."""
    host_bytes: float = 0.0
    """What a rank keeps in host memory where the recipe offloads (`cpu_offload`)."""
    bucket_bytes: float = 0.0
    """The part of `peak_bytes` that is DDP's buckets, a second copy of the gradients."""
    num_buckets: int = 0
    """About how many of DDP's buckets of 25 MiB that is; DDP fills each with whole gradients."""
    where: str = ""
    """What the step is doing at its peak."""
    buffers: str = ""
    """The DeepSpeed buffers in `peak_bytes`, with their formulas."""
    source: Literal["simulated", "napkin"] = "napkin"
    """Where `peak_bytes`, `exposed_s` and `where` come from."""
    not_simulated: str = ""
    """Why a strategy of PyTorch's engines could not be simulated; empty for every other strategy."""


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


@collected_by_hand()
def strategies(
    memory: Memory,
    gpus: int,
    group: int = GPUS_PER_NODE,
    told: Callable[[str], None] = lambda line: None,
    *,
    by_arithmetic: bool = False,
) -> list[Sharded | Refused]:
    """Every strategy on `gpus` GPUs, or the reason why the recipe cannot have it.

    `group` is the number of GPUs among which hybrid sharding divides the weights. Each GPU has a micro batch
    of its own; with model and tensor parallelism all share one. The recipe's fields about how it is divided
    apply to the strategies that divide it so. PyTorch's engines are simulated, unless the cache has the
    answer or `by_arithmetic` is true; `told` is called with a line about each simulation and each of its
    warnings. What cannot be simulated is estimated. Raises InputError unless gpus is at least 1, and for
    offloaded or in-backward optimizers, whose states are not where these strategies divide them.
    """
    recipe = memory.recipe
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
    alone = estimate(check_recipe(given | ALONE, "shard"), memory.hardware, memory.built.shape)
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
    rows: dict[str, Sharded | Refused] = {}
    engines: list[tuple[Sharded, Recipe]] = []
    for strategy in STRATEGIES:
        if strategy not in ranks:
            rows[strategy] = _by_states(alone, strategy, gpus)
            continue
        try:
            divided = check_recipe(ranks[strategy], strategy)
            rows[strategy] = row = _by_napkin(alone, strategy, divided)
            engines.append((row, divided))
        except InputError as error:
            rows[strategy] = Refused(strategy, str(error).removeprefix(f"{strategy}: "))
    if not by_arithmetic:
        rows |= {row.strategy: row for row in _simulated(engines, memory.hardware, told)}
    return list(rows.values())


def _simulated(
    rows: list[tuple[Sharded, Recipe]], hardware: Hardware, told: Callable[[str], None]
) -> Iterator[Sharded | Refused]:
    """The rows with the numbers of a simulation of rank 0 of each recipe, equal recipes once."""
    new = partial(Simulations, hardware, told=told, few_layers=True)
    all_at_once((new(), recipe) for recipe in dict.fromkeys(r for _, r in rows))
    simulations, warn = new(), cache(told)  # each warning once
    for row, recipe in rows:
        try:
            profile = simulations.timed(recipe)
        except CannotDivide as error:
            yield Refused(row.strategy, str(error))
            continue
        except InputError as error:
            yield replace(row, not_simulated=str(error))
            continue
        for warning in profile.warnings:
            warn(f"warning: {warning}")
        yield replace(
            row,
            peak_bytes=profile.memory.peak_allocated_bytes or 0,
            fits=simulations.profile(recipe).oom is None,
            tokens_per_s=profile.step.tokens_per_s,
            host_bytes=profile.memory.host_bytes or 0,
            exposed_s=sum(phase.communication_s or 0.0 for phase in profile.phases.values()),
            where=(profile.memory.peak_phase or "").replace("_", " "),
            source="simulated",
        )
    simulations.keep()


def bucket_note(rows: Iterable[Sharded | Refused]) -> str:
    """A sentence about DDP's second copy of the gradients; empty where there is no DDP."""
    for row in rows:
        if isinstance(row, Sharded) and row.num_buckets:
            return (
                "DDP's peak holds its buckets, a second copy of the gradients: "
                f"{in_gib(row.bucket_bytes)} that gradient_as_bucket_view=True does without"
            )
    return ""


def _by_napkin(alone: Memory, strategy: str, recipe: Recipe) -> Sharded:
    """The row of a strategy of PyTorch's engines by arithmetic; `recipe` is divided, `alone` on one GPU."""
    rank = estimate(recipe, alone.hardware, alone.built.shape)
    phases = step_time(rank).phases.values()
    return Sharded(
        strategy,
        States(
            rank.device_parameters if rank.away else rank.parameter_bytes,
            0 if rank.away else rank.gradient_bytes,
            rank.device_state,
        ),
        rank.peak.total_bytes,
        sum(phase.sent_bytes for phase in phases),
        sum(phase.sent_s for phase in phases),
        sum(phase.exposed_s for phase in phases),
        OVERLAP[strategy],
        rank.required_bytes <= rank.hardware.memory_bytes,
        None,
        sum(rank.host_parts.values()),
        rank.bucket_bytes,
        rank.bucket_bytes // BUCKET_BYTES + recipe.ddp,
        rank.peak.where,
    )


def _by_states(memory: Memory, strategy: str, gpus: int) -> Sharded:
    """The row of model parallelism or a ZeRO stage by arithmetic, from the recipe's `memory` on one GPU."""
    whole = States(memory.parameter_bytes, memory.gradient_bytes, memory.device_state)
    states = model_states(strategy, whole, gpus)
    buffers = zero_buffers(memory, strategy) if gpus > 1 else []
    held = sum(buffer.size_bytes for buffer in buffers)
    peak = held + max(_at(moment, strategy, states, whole, gpus) for moment in memory.moments[1:])
    sent, exposed = _traffic(memory, strategy, gpus)
    byte_s = sent_byte_s(memory.hardware, range(gpus))
    exposed_s = exposed * byte_s + max(0.0, (sent - exposed) * byte_s - _hidden_s(memory, strategy))
    formula = "; ".join(f"{buffer.name} {buffer.formula}" for buffer in buffers)
    fits = peak + memory.hardware.calibration.cuda_context_bytes <= memory.hardware.memory_bytes
    overlap = OVERLAP[strategy]
    return Sharded(strategy, states, peak, sent, sent * byte_s, exposed_s, overlap, fits, buffers=formula)


def _hidden_s(memory: Memory, strategy: str) -> float:
    """The seconds of computation that can hide a strategy's communication. Gradients are complete, and are
    sent, in the backward of the step's last micro batch; sharded parameters are gathered in every pass."""
    computing = step_time(memory).phases
    forward_s, backward_s = computing["forward"].seconds, computing["backward"].seconds
    if strategy in ("ZeRO-1", "ZeRO-2"):
        return backward_s / memory.recipe.gradient_accumulation_steps
    return forward_s + backward_s


def _at(moment: Moment, strategy: str, states: States, whole: States, gpus: int) -> float:
    """The bytes of a GPU at a moment of the step, with the states divided as in `states`."""
    share = states.gradients / whole.gradients if whole.gradients else 1.0
    now = moment.held
    held = states.parameters + now["gradients"] * share + states.optimizer
    own = now["activations"] + now["temporaries"]
    if moment.phase == "optimizer_step":  # temporaries are as large as what a GPU steps
        stepped = states.optimizer / whole.optimizer if whole.optimizer else share
        own = now["activations"] + now["temporaries"] * stepped
    if strategy == "model parallel":
        own /= gpus
    return held + own + now["inputs"] + now["other"]


def _traffic(memory: Memory, strategy: str, gpus: int) -> tuple[float, float]:
    """The bytes that a GPU sends in one step, and how many of them no computation can hide.

    ZeRO-1 and 2: a reduce-scatter of the gradients, and an all-gather of the updated parameters after the
    step. ZeRO-3: an all-gather of all parameters in forward and again in backward, for every micro batch, and
    a reduce-scatter of the gradients: 1.5 times DDP. Model parallel: the residual stream at each border,
    forward and back.
    """
    micro = memory.recipe.gradient_accumulation_steps
    gradients, everything = memory.gradient_bytes, memory.parameter_bytes
    trained, share = gradients, sent_share("all_gather", gpus)  # updated weights are as large as gradients
    if strategy == "model parallel":
        border = 2 * micro * memory.activations.block_input.size_bytes if gpus > 1 else 0
        return border, border
    if strategy in ("ZeRO-1", "ZeRO-2"):
        return share * (gradients + trained), share * trained
    return share * (2 * micro * everything + gradients * micro), 0.0


OVERLAP = {
    "model parallel": "nothing hides it; with k micro batches a GPU idles for (N-1)/(k+N-1) of the step",
    "tensor parallel": "nothing hides it: the next layer waits for each sum; GPUs share one micro batch",
    "DDP": "the all-reduce runs under backward, bucket by bucket; the last bucket is waited for",
    "ZeRO-1": "the reduce-scatter runs under backward; the all-gather after the step does not",
    "ZeRO-2": "the reduce-scatter runs under backward; the all-gather after the step does not",
    "ZeRO-3": "the next layers' all-gather runs under these layers' compute",
    "FSDP2": "the next unit's all-gather runs under this one's compute; not the first, nor the last sum",
    "hybrid sharding": "as FSDP2 on the fast links of a group; the sum across groups under backward",
}
