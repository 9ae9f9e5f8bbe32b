"""A recipe's memory and time on a napkin: about right, in milliseconds, every term checkable by hand. No torch.

`predict` gives the StepProfile; harness/napkin/text.py prints the derivation line by line.
"""

from __future__ import annotations

from harness.architecture import ModelShape, load_shape
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin.memory import Memory, Moment, Sizes, required_bytes
from harness.napkin.timing import Timing
from harness.napkin.weights import BuiltModel
from harness.recipe import Recipe
from harness.step_profile import (
    Allocation,
    MemoryBreakdown,
    MemoryStats,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)


def estimate(recipe: Recipe, hardware: Hardware, shape: ModelShape | None = None) -> Memory:
    """The memory of `recipe`, phase by phase, for a model of `shape` (None: the recipe's own).

    Raises InputError for a model that cannot be read, and a toggle that it or the device cannot have.
    """
    hardware.peak_flops(recipe.compute_dtype)  # refuses a dtype the device has no units for
    shape = shape or load_shape(recipe.model)
    if shape.positions and recipe.seq_len > shape.positions:
        raise InputError(
            f"seq_len: {recipe.seq_len} is more than the {shape.positions} positions of model: "
            f"{recipe.model}. Set seq_len to at most {shape.positions}."
        )
    for count, heads in ((shape.heads, "query heads"), (shape.kv_heads, "key-value heads")):
        if count % recipe.tp:
            raise InputError(f"tp: {recipe.tp} does not divide the {count} {heads} of the model. Give a divisor.")
    return Memory(Sizes(BuiltModel(recipe, shape), hardware))


def warnings_of(recipe: Recipe) -> list[str]:
    """What `predict` warns of; nothing for a model that cannot be read."""
    try:
        return BuiltModel(recipe, load_shape(recipe.model)).surprises
    except InputError:
        return []


def predict(recipe: Recipe, hardware: Hardware, shape: ModelShape | None = None) -> StepProfile:
    """The StepProfile of one steady optimizer step. What arithmetic cannot know is None: reserved memory
    and so the process's, spread of times, loss."""
    return profile(estimate(recipe, hardware, shape))


def profile(memory: Memory) -> StepProfile:
    """`predict`, from an estimate at hand."""
    sizes, peak = memory.sizes, memory.peak
    recipe, hardware, timing = sizes.recipe, sizes.hardware, Timing(sizes)
    parts = [name for name in Moment.__dataclass_fields__ if name not in ("phase", "where")]
    fits = required_bytes(memory) <= hardware.memory_bytes
    top = largest_tensors(memory)
    return StepProfile(
        source="napkin",
        recipe=recipe.model_dump(mode="json"),
        hardware=hardware.summary(recipe.compute_dtype),
        provenance={"calibration": hardware.calibration.source, "attention": sizes.activations.kernel},
        warnings=sizes.built.surprises,
        memory=MemoryStats(
            kind="closed_form",
            peak_allocated_bytes=peak.total_bytes,
            peak_phase=_phase_name(peak),
            at_peak=MemoryBreakdown(**{f"{name}_bytes": getattr(peak, name) for name in parts}),
            host_bytes=sizes.host_bytes,
            cuda_context_bytes=hardware.calibration.cuda_context_bytes,
            setup_peak_allocated_bytes=memory.moments[0].total_bytes + sizes.quantizing_bytes,
            first_step_peak_allocated_bytes=_first_step_peak(memory),
        ),
        phases={name: _phase_stats(memory, timing, name) for name in timing.phases},
        step=StepStats(
            time_s=TimeStats(median=timing.seconds),
            tokens_per_s=timing.tokens_per_s,
            model_flops=timing.model_flops,
            mfu=timing.utilization(timing.model_flops),
            hfu=timing.utilization(timing.hardware_flops),
            bound=timing.bound,
        ),
        top=top,
        oom=None if fits else OutOfMemoryReport(phase=_phase_name(peak), top=top),
    )


def largest_tensors(memory: Memory, count: int = 8) -> list[Allocation]:
    """The largest parameters and kept activations, each as many times as it is there."""
    sizes, acts = memory.sizes, memory.sizes.activations
    found = [(w.size_bytes, "parameters", "setup", w.name, w.count) for w in (*sizes.outer, *sizes.in_blocks)]
    kept = [(term, 1) for term in acts.kept_by_loss]
    for block in sizes.built.whole.blocks:
        terms = [acts.block_input] if sizes.recipe.gradient_checkpointing else acts.kept_by(block)
        kept += [(term, block.count) for term in terms]
    found += [(t.size_bytes * times, "activations", "forward", t.name, times) for t, times in kept]
    largest = sorted(found, key=lambda each: each[0], reverse=True)[:count]
    return [
        Allocation(size_bytes=size, category=category, phase=phase, module=f"{name} × {times}")
        for size, category, phase, name, times in largest
    ]


def _first_step_peak(memory: Memory) -> int:
    """As in a steady step, but moments are born in the optimizer step."""
    sizes = memory.sizes
    born_early = sizes.recipe.steps_on_host or sizes.recipe.optimizer_in_backward
    unborn = 0 if born_early else sizes.state_bytes - sizes.paged_bytes
    return max(m.total_bytes - (0 if m.phase == "optimizer_step" else unborn) for m in memory.moments[1:])


def _phase_name(moment: Moment) -> str:
    return "backward" if moment.phase == "loss" else moment.phase


def _phase_stats(memory: Memory, timing: Timing, name: str) -> PhaseStats:
    moments = [m for m in memory.moments[1:] if _phase_name(m) == name]
    phase = timing.phases[name]
    return PhaseStats(
        time_s=TimeStats(median=phase.seconds),
        peak_allocated_bytes=max((m.total_bytes for m in moments), default=None),
        allocated_at_end_bytes=memory.at_end(name),
        flops=phase.flops,
        bytes_moved=phase.bytes_moved,
    )
