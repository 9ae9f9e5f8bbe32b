"""Napkin: a recipe's memory and time in closed form, each term checkable by hand. No torch, milliseconds.

`predict` gives the StepProfile, `derive` the derivation line by line.
"""

from __future__ import annotations

from harness.architecture import ModelShape, load_shape
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin.memory.moments import Memory, Moment, memory_of, required_bytes
from harness.napkin.memory.setup import setup_peak_bytes
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.weights import surprises
from harness.napkin.timing import Timing
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
    return memory_of(BuiltModel(recipe, shape), hardware)


def warnings_of(recipe: Recipe) -> list[str]:
    """What `predict` warns of; nothing for a model that arithmetic does not know."""
    try:
        return surprises(BuiltModel(recipe, load_shape(recipe.model)))
    except InputError:
        return []


def predict(recipe: Recipe, hardware: Hardware, shape: ModelShape | None = None) -> StepProfile:
    """The StepProfile of one steady optimizer step. What arithmetic cannot know is None: reserved memory
    and so the process's, spread of times, loss."""
    return profile(estimate(recipe, hardware, shape))


def profile(memory: Memory) -> StepProfile:
    """`predict`, from an estimate at hand."""
    sizes = memory.sizes
    recipe, hardware = sizes.recipe, sizes.hardware
    timing = Timing(sizes)
    return StepProfile(
        source="napkin",
        recipe=recipe.model_dump(mode="json"),
        hardware=hardware.summary(recipe.compute_dtype),
        provenance={
            "calibration": hardware.calibration.source,
            "attention": sizes.stages.blocks[0].tape.attention_kernel,
        },
        warnings=surprises(sizes.built),
        memory=_memory_stats(memory),
        phases={name: _phase_stats(memory, timing, name) for name in timing.phases},
        step=_step_stats(timing),
        top=largest_tensors(memory),
        oom=_out_of_memory(memory),
    )


def largest_tensors(memory: Memory, count: int = 8) -> list[Allocation]:
    """The largest parameters and kept activations, each as many times as it is there."""
    sizes = memory.sizes
    found = [
        Allocation(
            size_bytes=w.total_bytes, category="parameters", phase="setup", module=f"{w.name} × {w.count}"
        )
        for w in [*sizes.outer, *sizes.in_blocks]
    ]
    stages = [*(s for s in sizes.stages.blocks if not s.checkpointed), sizes.stages.loss]
    found += [
        Allocation(
            size_bytes=t.size_bytes * stage.count,
            category="activations",
            phase="forward",
            module=f"{t.name} × {stage.count}",
        )
        for stage in stages
        for t in stage.kept_tensors
    ]
    return sorted(found, key=lambda a: a.size_bytes, reverse=True)[:count]


def _memory_stats(memory: Memory) -> MemoryStats:
    sizes, peak = memory.sizes, memory.peak
    return MemoryStats(
        kind="closed_form",
        peak_allocated_bytes=peak.total_bytes,
        peak_phase=_phase_name(peak),
        at_peak=MemoryBreakdown(
            parameters_bytes=peak.parameters,
            gradients_bytes=peak.gradients,
            optimizer_state_bytes=peak.optimizer_state,
            activations_bytes=peak.activations,
            temporaries_bytes=peak.temporaries,
            inputs_bytes=peak.inputs,
            other_bytes=peak.other,
            gathered_parameters_bytes=peak.gathered_parameters,
        ),
        host_bytes=sizes.host_bytes,
        cuda_context_bytes=sizes.hardware.calibration.cuda_context_bytes,
        setup_peak_allocated_bytes=setup_peak_bytes(sizes, memory.moments[0].total_bytes),
        first_step_peak_allocated_bytes=_first_step_peak(memory),
    )


def _first_step_peak(memory: Memory) -> int:
    """As in a steady step, but moments are born in the optimizer step."""
    sizes = memory.sizes
    unborn = 0 if sizes.optimizer.on_host or sizes.optimizer.in_backward else sizes.optimizer.state_bytes
    return max(m.total_bytes - (0 if m.phase == "optimizer_step" else unborn) for m in memory.moments[1:])


def _phase_name(moment: Moment) -> str:
    return "backward" if moment.phase == "loss" else moment.phase


def _phase_stats(memory: Memory, timing: Timing, name: str) -> PhaseStats:
    moments = [m for m in memory.moments[1:] if _phase_name(m) == name]
    phase = timing.phases[name]
    return PhaseStats(
        time_s=TimeStats(median=phase.seconds),
        peak_allocated_bytes=max((m.total_bytes for m in moments), default=None),
        allocated_at_end_bytes=end_of(memory, name),
        flops=phase.flops,
        bytes_moved=phase.bytes_moved,
    )


def end_of(memory: Memory, phase: str) -> int | None:
    """Bytes on the device when a phase of the last micro batch ends; None for data."""
    sizes, last = memory.sizes, memory.moments[-1]
    settled = last.inputs + last.other + sizes.device_state + sizes.device_parameters()
    recipe = sizes.recipe
    settled += sizes.bucket_bytes
    leave = sizes.optimizer.in_backward or recipe.parameters_on_host or sizes.parts_on_host
    gradients = 0 if leave else sizes.gradient_bytes
    if phase == "forward":
        kept = sizes.kept_by_ctx if recipe.activations_on_host else sizes.kept_in_forward
        whole = sizes.units.after_forward() if sizes.units else 0
        return settled + kept + sizes.earlier_gradients + whole
    return {"backward": settled + gradients + sizes.kept_by_ctx, "optimizer_step": settled}.get(phase)


def _step_stats(timing: Timing) -> StepStats:
    return StepStats(
        time_s=TimeStats(median=timing.seconds),
        tokens_per_s=timing.tokens_per_s,
        model_flops=timing.model_flops,
        mfu=timing.utilization(timing.model_flops),
        hfu=timing.utilization(timing.hardware_flops),
        bound=timing.bound,
    )


def _out_of_memory(memory: Memory) -> OutOfMemoryReport | None:
    available = memory.sizes.hardware.memory_bytes
    if required_bytes(memory) <= available:
        return None
    return OutOfMemoryReport(phase=_phase_name(memory.peak), top=largest_tensors(memory))
