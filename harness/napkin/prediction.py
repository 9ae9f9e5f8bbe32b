"""The estimate of a recipe's memory and time by arithmetic, as an object and as a StepProfile. No torch."""

import harness.step_profile as answer
from harness.architecture import ModelShape, load_shape
from harness.errors import InputError
from harness.hardware import Hardware
from harness.napkin.memory import Memory
from harness.napkin.timing import step_time
from harness.napkin.weights import BuiltModel
from harness.recipe import Recipe, surprises_of_mesh
from harness.step_profile import StepProfile


def estimate(recipe: Recipe, hardware: Hardware, shape: ModelShape | None = None) -> Memory:
    """The memory of `recipe`, phase by phase, for a model of `shape` (None: the recipe's own).

    Raises InputError for a config without sizes, for layers that the model does not have, for a sequence that
    is too long for it, and for a dtype or attention that the device does not have.
    """
    hardware.check(recipe)
    shape = shape or load_shape(recipe.model)
    if shape.positions and recipe.seq_len > shape.positions:
        raise InputError(
            f"seq_len: {recipe.seq_len} is more than the {shape.positions} positions of model: "
            f"{recipe.model}. Set seq_len to at most {shape.positions}."
        )
    if recipe.tiles_mlps and (shape.residual_dropout or all(b.feed != "dense" for b in shape.blocks)):
        raise InputError(
            f"mlp_tiles: {recipe.model} drops values in its MLPs, or has none for all "
            "tokens. Set mlp_tiles: 1."
        )
    return Memory(BuiltModel(recipe, shape), hardware)


def warnings_of(recipe: Recipe) -> list[str]:
    """The warnings in the profile of `predict`; none for a model whose config cannot be read."""
    try:
        return BuiltModel(recipe, load_shape(recipe.model)).surprises
    except InputError:
        return []


def predict(recipe: Recipe, hardware: Hardware, shape: ModelShape | None = None) -> StepProfile:
    """The StepProfile of one steady optimizer step. What arithmetic cannot know (reserved memory) is None."""
    return profile(estimate(recipe, hardware, shape))


def profile(memory: Memory) -> StepProfile:
    """The StepProfile of `predict`, made from an estimate."""
    recipe, hardware, built, acts = memory.recipe, memory.hardware, memory.built, memory.activations
    peak, time, peaks = memory.peak, step_time(memory), dict[str, int]()
    peak_phase = peak.phase.replace("loss", "backward")
    for moment in memory.moments[1:]:
        phase = moment.phase.replace("loss", "backward")
        peaks[phase] = max(peaks.get(phase, 0), moment.total_bytes)
    stats = answer.MemoryStats(
        kind="closed_form",
        peak_allocated_bytes=peak.total_bytes,
        peak_phase=peak_phase,
        at_peak=answer.MemoryBreakdown(**{f"{name}_bytes": size for name, size in peak.held.items()}),
        host_bytes=memory.optimizer.paged_bytes + sum(memory.host_parts.values()),
        cuda_context_bytes=hardware.calibration.cuda_context_bytes,
        setup_peak_allocated_bytes=memory.moments[0].total_bytes + memory.quantizing_bytes,
    )
    kept = [(1, term) for term in acts.loss.kept]
    kept += [(b.count, term) for b in built.shape.blocks for term in acts.kept_until_backward(b)]
    found = [(n * t.size_bytes, "activations", "forward", f"{t.name} × {n}") for n, t in kept]
    for weight in (*built.outer, *built.in_blocks):
        found.append((weight.total_bytes, "parameters", "setup", f"{weight.name} × {weight.count}"))
    top = [
        answer.Allocation(size_bytes=n, category=c, phase=p, module=m) for n, c, p, m in sorted(found)[:-9:-1]
    ]
    fits = memory.required_bytes <= hardware.memory_bytes
    return StepProfile(
        source="napkin",
        recipe=recipe.model_dump(mode="json"),
        hardware=hardware.summary(recipe.compute_dtype),
        provenance={"calibration": hardware.calibration.source, "attention": acts.kernel},
        warnings=[*surprises_of_mesh(recipe), *built.surprises],
        memory=stats,
        phases={name: phase.stats(peaks.get(name)) for name, phase in time.phases.items()},
        step=time.stats,
        top=top,
        oom=None if fits else answer.OutOfMemoryReport(phase=peak_phase, top=top),
    )
