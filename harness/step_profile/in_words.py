"""A profile in sentences: whether it fits, why memory ran out, what leaks, where the time goes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median

from harness.step_profile.between_steps import PHASES_BETWEEN_STEPS, EvaluationStats, EvaluationWay
from harness.step_profile.step_profile import LeakReport, RanksReport, StepProfile
from harness.units import in_gib, ms

NCCL_COMMUNICATOR = (544_000_000, 1_600_000_000)
"""The fewest and the most bytes that NCCL takes for one communicator on each GPU: buffers of its channels, by
links, ranks and version, which PyTorch's allocator does not count. Seen on two A100 after one all-reduce
(github.com/NVIDIA/nccl/issues/964), and with one communicator of eight GPUs (issues/864)."""
TIGHT = 0.02
"""A share of the GPU's memory: with less to spare, what is not counted may decide. It is a choice, about half
a GiB of 24."""
ALWAYS = "what CUDA's libraries load, ECC where it takes memory, a display"
"""What no answer but a measurement counts."""


def communicators(profile: StepProfile) -> int:
    """How many communicators of NCCL a rank has: one for each dimension of the recipe's mesh with several
    ranks, and one for a watched loop on several ranks."""
    recipe = profile.recipe or {}
    sizes = [recipe.get(name) for name in ("dp_replicate", "dp_shard", "tp")]
    ours = sum(isinstance(size, int) and size > 1 for size in sizes)
    return ours or int(profile.ranks is not None and profile.ranks.world_size > 1)


def of_nccl(profile: StepProfile) -> str:
    """The bytes that NCCL takes, in words; empty for one process."""
    count = communicators(profile)
    low, high = (in_gib(count * size) for size in NCCL_COMMUNICATOR)
    each = f" for {count} communicators" if count > 1 else ""
    return f"NCCL's buffers ({low} to {high}{each})" if count else ""


def spare_bytes(profile: StepProfile) -> int | None:
    """The bytes of the device's memory that a step leaves free, negative where so many are missing. None
    where memory ran out, and where the peak or the size of a GPU's memory is not known."""
    taken, device = profile.memory.taken_bytes(), profile.hardware
    if profile.oom is not None or taken is None or device.memory_bytes is None or device.kind == "cpu":
        return None
    return device.memory_bytes - taken


def is_tight(profile: StepProfile) -> bool:
    """Whether a step fits by what is counted, and what is not counted may take all that it leaves free. A
    measured run has shown that it does not."""
    spare = spare_bytes(profile)
    if profile.source == "measured" or spare is None or spare < 0:
        return False
    of_device = TIGHT * (profile.hardware.memory_bytes or 0)
    return spare < max(of_device, communicators(profile) * NCCL_COMMUNICATOR[1])


WORTH_SAYING = 1.1
"""A rank is named if a phase takes it more than this many times the median of all ranks."""
KERNELS = {
    "product": "products",
    "norm": "norms",
    "cross_entropy": "cross entropy",
    "reduction": "reductions",
    "dequantize": "dequantization",
    "copy": "copies",
    "copy_in": "gradient copies",
    "cast_in": "gradient casts",
    "idle": "device idle",
}
"""The words for classes of kernels and other parts of a step's time that are not shown by their name."""
WITHOUT_HOST = "without what it waits for the host"
"""Said of times that are the device's alone."""
SMALL_SHARE = 0.02
"""A share of the device's time: classes with less are shown together, as the rest."""
SMALL_CHANGE = 0.05
SMALL_CHANGE_SHARE = 0.005
"""Shares of the whole change, and of the time before it: parts that change by less are not named."""
MEMORY_KINDS = {
    "cuda_allocator": "the CUDA allocator's counters",
    "simulated_allocator": "a model of the CUDA allocator",
    "live_tensors": "the bytes of live CPU tensors (there is no CUDA allocator here)",
    "closed_form": "arithmetic",
}
"""The words for `MemoryStats.kind`."""


def verdict(profile: StepProfile) -> str:
    """One sentence: whether it fits, and how much is to spare; where no size of a device is known, what it
    takes.

    There is a third verdict, too tight to call: so little is to spare that what is not counted decides.
    """
    memory, device = profile.memory, profile.hardware
    if profile.oom is not None:
        size = "" if device.memory_bytes is None else f" ({in_gib(device.memory_bytes)})"
        if profile.oom.phase in PHASES_BETWEEN_STEPS:
            return f"training fits on {device.name}{size}, the {profile.oom.phase} does not{_remedy(profile)}"
        return f"does not fit on {device.name}{size}: the memory runs out in {profile.oom.phase}"
    taken = memory.taken_bytes()
    if taken is None:
        return "no peak is known"
    spare = spare_bytes(profile)
    if spare is None:
        return f"takes {in_gib(taken)} on {device.name}"
    room = f"{in_gib(device.memory_bytes)} of {device.name}"
    if spare < 0:
        return f"does not fit in the {room}: {in_gib(-spare)} are missing"
    nccl = of_nccl(profile)
    if is_tight(profile):
        uncounted = ", ".join(filter(None, (nccl, ALWAYS)))
        return f"too tight to call in the {room}: {in_gib(spare)} to spare, and not counted: {uncounted}"
    uncounted = f", {nccl} not counted" if nccl and profile.source != "measured" else ""
    fits = "fits" if profile.complete else "as far as it came, it fits"
    return f"{fits} in the {room} with {in_gib(spare)} to spare{uncounted}"


def _remedy(profile: StepProfile) -> str:
    """For an evaluation that does not fit: how large the logits are, and which settings make it fit."""
    evaluation = profile.evaluation
    if evaluation is None or profile.oom is None or profile.oom.phase != "evaluation":
        return ""
    logits = f": {in_gib(evaluation.logits_bytes)} of logits" if evaluation.logits_bytes else ""
    fitting = [way for way in evaluation.instead if way.fits]
    if not fitting:
        return logits
    return f"{logits}; {_way(fitting[0])} brings its peak to {in_gib(fitting[0].peak_allocated_bytes)}"


def between_steps_in_words(profile: StepProfile) -> Iterator[str]:
    """A sentence on the evaluation and one on the checkpoint, where they were asked for."""
    evaluation, checkpoint = profile.evaluation, profile.checkpoint
    if evaluation is not None:
        peak = _peak_of(profile, "evaluation")
        ranks = evaluation.ranks
        everywhere = f" on each of {ranks} ranks, gathered on every one" if ranks > 1 else ""
        how = f"evaluation of {evaluation.batches} batches of {evaluation.batch_size} rows{everywhere}"
        yield f"{how}, {_way(evaluation)}: {peak}{_logits(evaluation)}"
        for way in evaluation.instead:
            found = f"{in_gib(way.peak_allocated_bytes)} at its peak" if way.fits else "does not fit either"
            host = f", {in_gib(way.host_bytes)} on the host" if way.host_bytes else ""
            yield f"  with {_way(way)}: {found}{host}"
    if checkpoint is not None:
        files = f"{in_gib(checkpoint.weights_bytes)} of weights"
        files += f" and {in_gib(checkpoint.optimizer_bytes)} of optimizer state"
        whose = "checkpoint, of which this rank writes" if checkpoint.part else "checkpoint of"
        known = checkpoint.host_bytes is not None
        host = f"; {in_gib(checkpoint.host_bytes)} of copies on the host at most" if known else ""
        yield f"{whose} {files}: {_peak_of(profile, 'saving')}{host}"


def _peak_of(profile: StepProfile, phase: str) -> str:
    if profile.oom is not None and profile.oom.phase == phase:
        return "memory runs out"
    peak, step = profile.phases[phase].peak_allocated_bytes or 0, profile.memory.peak_allocated_bytes or 0
    relation = "more than" if peak > step else "less than"
    return f"{in_gib(peak)} at its peak, {in_gib(abs(peak - step))} {relation} a training step"


def _way(way: EvaluationStats | EvaluationWay) -> str:
    if not way.keeps_logits:
        return "the loss alone (prediction_loss_only)"
    if way.accumulation_steps is None:
        return "all logits kept on the device"
    return f"eval_accumulation_steps {way.accumulation_steps}"


def _logits(evaluation: EvaluationStats) -> str:
    if evaluation.logits_bytes is None:
        return ""
    logits = f"; the logits are {in_gib(evaluation.logits_bytes)} of {evaluation.logits_dtype}"
    host = f", and on the host {in_gib(evaluation.host_bytes)} at most" if evaluation.host_bytes else ""
    return logits + host


def ranks_in_words(ranks: RanksReport) -> Iterator[str]:
    """Which rank has the highest peak and how far the ranks differ; for each phase, a rank that takes much
    longer than most.
    """
    peaks = {r.rank: r.peak_allocated_bytes for r in ranks.ranks if r.peak_allocated_bytes is not None}
    if len(ranks.ranks) < ranks.world_size:
        yield f"{len(ranks.ranks)} of {ranks.world_size} ranks left a profile."
    if len(peaks) > 1:
        most, least = max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)
        spread = peaks[most] - peaks[least]
        words = f"{ranks.world_size} ranks: rank {most} peaks highest, at {in_gib(peaks[most])}"
        below = f"rank {least} lowest, {in_gib(spread)} ({spread / peaks[most]:.1%}) below it"
        equal = f"{ranks.world_size} ranks: all peak at {in_gib(peaks[most])}, to the byte"
        yield f"{words}; {below}." if spread else f"{equal}."
    for phase in dict.fromkeys(name for r in ranks.ranks for name in r.phases_s):
        times = {r.rank: r.phases_s[phase] for r in ranks.ranks if phase in r.phases_s}
        longest = max(times, key=times.__getitem__)
        middle = median(times.values())
        if len(times) > 1 and times[longest] > WORTH_SAYING * middle:
            yield (
                f"{phase}: rank {longest} takes longest, {ms(times[longest])} ms; the median of all is "
                f"{ms(middle)} ms."
                + (" Ranks that exchange gradients wait there: it came first." if phase == "backward" else "")
            )


def leak_in_words(leak: LeakReport) -> str:
    """One sentence: how fast memory grows, what grows, and where it was allocated."""
    grown = sorted(leak.by_category.items(), key=lambda item: -item[1])
    what = ", ".join(f"{name} {in_gib(size)}" for name, size in grown if size > 0)
    text = f"memory leak: {in_gib(leak.bytes_per_step)} more allocated after each of {leak.num_steps} steps"
    text += f" ({what})" if what else ""
    if leak.largest is not None:
        caller = next((line for line in leak.largest.stack if not line.startswith("torch/")), None)
        place = f" at {caller}" if caller else ""
        made = f"{in_gib(leak.largest.size_bytes)} made in {leak.largest.phase}{place}"
        text += f"; the largest left behind: {made}"
    return text


def peak_in_words(profile: StepProfile) -> str:
    """In which phase and step the training has its peak and how high it is, and what else goes higher."""
    memory = profile.memory
    step = "" if memory.peak_step is None else f"step {memory.peak_step + 1}"
    where = " of ".join(filter(None, (memory.peak_phase, step)))
    if memory.peak_phase == "between" and step:
        where = f"what follows {step}"
    peaks = [f"{in_gib(memory.peak_allocated_bytes)} allocated{f', in {where}' if where else ''}"]
    if memory.peak_reserved_bytes is not None:
        peaks.append(f"{in_gib(memory.peak_reserved_bytes)} reserved by the allocator")
    if memory.process_bytes is not None:
        peaks.append(f"{in_gib(memory.process_bytes)} with the CUDA context")
    recipe = profile.recipe or {}
    paged = str(recipe.get("optimizer")).startswith("paged")
    if memory.host_bytes and (paged or recipe.get("offload") or recipe.get("cpu_offload")):
        kind = "unified" if paged else "host"
        each = " by each rank" if recipe.get("parallel", "none") != "none" else ""
        peaks.append(f"{in_gib(memory.host_bytes)} kept in {kind} memory{each}")
    peaks += [f"{in_gib(size)} in its {name}" for name, size in higher_than_steps(profile).items()]
    return "; ".join(peaks)


def higher_than_steps(profile: StepProfile) -> dict[str, int]:
    """The allocated bytes of the phases outside the steps of a watched program (its setup too) that take more
    than the steps, by name; empty for a recipe."""
    if profile.command is None:
        return {}
    apart = {name: profile.phases[name] for name in PHASES_BETWEEN_STEPS if name in profile.phases}
    peaks = {name: stats.peak_allocated_bytes for name, stats in apart.items()}
    peaks["setup"] = profile.memory.setup_peak_allocated_bytes
    most = profile.memory.peak_allocated_bytes or 0
    return {name: size for name, size in peaks.items() if size is not None and size > most}


def time_in_words(parts_s: Mapping[str, float]) -> str:
    """What a step's time consists of, from `StepProfile.parts_of_time_s`; empty where that is not known.

    `products 61 %, elementwise 22 %, copies 12 %, device idle 4 %, rest 2 %`
    """
    whole = sum(parts_s.values())
    shares = {kernel: seconds / whole for kernel, seconds in parts_s.items()} if whole else {}
    named = {KERNELS.get(kernel, kernel): share for kernel, share in shares.items() if share >= SMALL_SHARE}
    if len(named) < len(shares):
        named["rest"] = 1 - sum(named.values())
    return ", ".join(f"{kernel} {share:.0%}" for kernel, share in named.items() if share >= 0.005)


def change_of_time_in_words(parts_s: Mapping[str, tuple[float, float]]) -> str:
    """Which parts of a step's time make up the difference of two steps, the largest first; empty where that
    is not known.

    `parts_s`: each part's seconds in the one and in the other. `dequantization +8.1, elementwise -3.0 ms`
    """
    changes = {part: there - here for part, (here, there) in parts_s.items()}
    whole = sum(here for here, _ in parts_s.values())
    least = max(SMALL_CHANGE * abs(sum(changes.values())), SMALL_CHANGE_SHARE * whole)
    named = [part for part in changes if abs(changes[part]) > least]
    named.sort(key=lambda part: -abs(changes[part]))
    words = ", ".join(f"{KERNELS.get(part, part)} {changes[part] * 1e3:+,.1f}" for part in named)
    return f"{words} ms" if words else ""


def explain_oom(profile: StepProfile) -> str:
    """One paragraph: where memory ran out, what was asked for, what filled it; then the advice."""
    oom = profile.oom
    assert oom is not None
    request = "" if oom.requested_bytes is None else f", asking for {in_gib(oom.requested_bytes)}"
    request += f" ({oom.requested_is})" if oom.requested_is else ""
    free = "" if oom.free_bytes is None else f" with {in_gib(oom.free_bytes)} free"
    free += f", at {oom.requested_at}" if oom.requested_at else ""
    counts = Counter(f"{in_gib(tensor.size_bytes)} of {tensor.category}" for tensor in oom.top)
    largest = ", ".join(f"{count} x {one}" if count > 1 else one for one, count in list(counts.items())[:5])
    filled = f" The largest tensors: {largest}." if largest else ""
    if oom.batch_bytes and (rows := oom.batch_rows or 0) > 1:
        held, each = in_gib(oom.batch_bytes), in_gib(oom.batch_bytes // rows)
        filled += f" Inputs and activations of the batch's {rows:,} rows held {held} by then, {each} a row."
    advice = "".join(f"\n  {line}" for line in oom.advice)
    what_to_do = f" What would help, by arithmetic, the cheapest first:{advice}" if advice else ""
    return f"out of memory in {oom.phase}{request} on {profile.hardware.name}{free}.{filled}{what_to_do}"
