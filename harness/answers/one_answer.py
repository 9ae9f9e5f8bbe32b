"""The profile of one recipe by one kind of answer: commands, sweeps and pages get every profile from here."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.allocator import Settings, allocator_settings
from harness.errors import InputError
from harness.hardware import DEFAULT_HARDWARE, Hardware, find_hardware
from harness.recipe import Recipe, recipe_yaml
from harness.run_folder import RunFolder
from harness.step_profile import PHASES, EvaluationStats, EvaluationWay, StepProfile

if TYPE_CHECKING:
    from harness.measure import Progress
    from harness.training import AfterStep, Evaluation

Prediction = Literal["napkin", "simulated"]
"""The kinds of answer that need neither a GPU nor PyTorch's CUDA build."""


def predicted(
    source: Prediction,
    recipe: Recipe,
    hardware: Hardware | None = None,
    environment: Mapping[str, str] = os.environ,
) -> StepProfile:
    """The napkin or simulated profile, under the allocator settings of `environment`. Raises InputError."""
    hardware = hardware or find_hardware(DEFAULT_HARDWARE)
    if source == "napkin":
        from harness.napkin import predict

        return predict(recipe, hardware)
    from harness.simulate import simulate

    return simulate(recipe, hardware, allocator_settings(environment), explain_oom=False)[0]


def simulated(
    name: str,
    recipe: Recipe,
    hardware: Hardware,
    settings: Settings,
    *,
    folder: RunFolder | None,
    rank: int = 0,
    after: AfterStep | None = None,
) -> StepProfile:
    """The simulated profile of the recipe `name`, with advice where the memory runs out. It is written to
    `folder` with the memory's history.

    `rank` is the one that is simulated where the recipe divides a step among several. `after` says what is
    simulated after the training steps. An evaluation that takes more memory than a step is also simulated in
    the other ways to evaluate.
    """
    from harness.fit import advise, tensor_in_words
    from harness.simulate import simulate

    step = partial(simulate, recipe, hardware, settings, rank=rank)
    profile, memory = step(after=after, advise=advise)
    if profile.oom is not None and profile.oom.phase in PHASES:
        named = tensor_in_words(recipe, profile.oom.requested_bytes, profile.oom.phase)
        profile.oom.requested_is = named or profile.oom.requested_is
    if after is not None and after.evaluation is not None and profile.evaluation is not None:
        _add_other_ways(profile, profile.evaluation, after.evaluation, step)
    profile.provenance["recipe_name"] = name
    if folder is not None:
        folder.write_snapshot(memory.snapshot())
        folder.write_profile(profile)
    return profile


def _add_other_ways(
    profile: StepProfile, stats: EvaluationStats, evaluation: Evaluation, simulate: Callable[..., Any]
) -> None:
    """Add to `stats` what the evaluation would take if its logits went to the host after each batch, and if
    none were kept: where they are kept, and the evaluation takes more memory than a step. `simulate`
    simulates the step, and what comes after it."""
    from harness.training import AfterStep

    peak, step = profile.phases.get("evaluation"), profile.memory.peak_allocated_bytes or 0
    ran_out = profile.oom is not None and profile.oom.phase == "evaluation"
    is_small = peak is None or (not ran_out and (peak.peak_allocated_bytes or 0) <= step)
    if is_small or not evaluation.keep_logits:
        return
    for way in (replace(evaluation, accumulation_steps=1), replace(evaluation, keep_logits=False)):
        if way == evaluation:
            continue
        tried, _ = simulate(after=AfterStep(way), explain_oom=False)
        found = tried.evaluation
        assert found is not None
        if stats.logits_bytes is None:
            stats.logits_bytes, stats.logits_dtype = found.logits_bytes, found.logits_dtype
        stats.instead.append(
            EvaluationWay(
                accumulation_steps=way.accumulation_steps,
                keeps_logits=way.keep_logits,
                fits=tried.oom is None,
                peak_allocated_bytes=None if tried.oom else tried.phases["evaluation"].peak_allocated_bytes,
                host_bytes=found.host_bytes,
            )
        )


def measured(
    recipe: Recipe,
    folder: RunFolder,
    device: str | None = None,
    progress: Progress | None = None,
    *,
    snapshot: bool = True,
    after: AfterStep | None = None,
    alive: Callable[[str], None] | None = None,
) -> StepProfile:
    """Run the recipe on `device` of this machine (default: the first GPU, else the CPU), write the run to
    `folder`, and return its profile.

    `after` says what is measured after the training steps. `alive` is called with each phase that begins.
    Raises InputError for a device that is not there, and where the host's memory cannot hold the recipe.
    """
    from harness.fit import advise, check_host_memory
    from harness.measure import Silent, chosen_device, measure

    where = chosen_device(device)
    unchecked = check_host_memory(recipe, where.type)
    return measure(
        recipe,
        folder,
        progress or Silent(),
        where,
        snapshot=snapshot,
        advise=advise,
        warnings=[unchecked] if unchecked else [],
        after=after,
        alive=alive,
    )


def emulated(name: str, recipe: Recipe, hardware: Hardware) -> StepProfile:
    """The profile of `harness run --gpu`, in a process of its own, since the torch of this one has no virtual
    GPU. Raises InputError where none can be had, and where that process fails, with its last line.
    """
    from harness.virtual_gpu import why_not

    if reason := why_not():
        raise InputError(reason)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.yaml")
        path.write_text(recipe_yaml(recipe), encoding="utf-8")
        command = [sys.executable, "-m", "harness", "run", str(path), "--gpu", hardware.name, "--json"]
        command += ["--out", str(Path(folder, "run"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.stdout:
        raise InputError(
            f"{name} does not run on a virtual GPU: {(done.stderr.strip().splitlines() or [''])[-1]}"
        )
    return StepProfile.from_json(done.stdout, "the emulated answer")
