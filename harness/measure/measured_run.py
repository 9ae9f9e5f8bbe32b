"""Measures a recipe: the real training step on a device, from setup to StepProfile."""

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from harness.checkpoint import NotFiniteWeights, Saved, read, restore, save
from harness.data import DataSummary
from harness.errors import InputError, is_out_of_memory
from harness.measure.checkpoint import measure_checkpoint
from harness.measure.communication import Communication
from harness.measure.devices import check_units, chosen_device, device_observer
from harness.measure.leak import find_leak
from harness.measure.looking_back import LookBack, look_back
from harness.measure.not_finite import Origin, origin_of_loss, origin_of_weights
from harness.measure.observer import Advise, Progress
from harness.measure.step_times import log_line, peak_rss_bytes, phase_stats, step_stats
from harness.observe import FlopCount
from harness.parallel import lost_rank
from harness.recipe import Recipe
from harness.run_folder import RunFolder, steps_done_of
from harness.step_profile import (
    MOST_WEIGHTS,
    PHASES_BETWEEN_STEPS,
    Allocation,
    CheckpointStats,
    EvaluationStats,
    LeakReport,
    MemoryStats,
    NotFiniteReport,
    OutOfMemoryReport,
    StepProfile,
    leak_in_words,
)
from harness.system import held_back, provenance
from harness.training import (
    AfterStep,
    Batches,
    Kind,
    LoopObserver,
    Step,
    Training,
    attention_kernel,
    evaluate_into,
    remaining_kinds,
    run_steps,
    set_up,
    stats_of,
    step_kinds,
    surprises_of_model,
)
from harness.virtual_gpu import conclude_report, emulated_device, has_clock, where_times_are_from


def measure(
    recipe: Recipe,
    folder: RunFolder,
    progress: Progress,
    device: torch.device | None = None,
    *,
    snapshot: bool = True,
    after: AfterStep | None = None,
    advise: Advise | None = None,
    warnings: list[str] | None = None,
    alive: Callable[[str], None] | None = None,
) -> StepProfile:
    """Run the recipe, write its folder, and return what was measured.

    A folder that resumes a checkpoint makes the run go on after it. An interrupt, running out of memory and
    a nan loss give a profile too, with `complete` false (and `oom` or `not_finite` set, `oom.advice` by
    `advise`); the caller decides on the exit status. `warnings` stand in the profile before the run's own.
    Raises InputError for a recipe that cannot run here and for a checkpoint that cannot be resumed, before
    anything is written; for a full disk, after writing as much of profile and snapshot as has room; and for a
    rank that is gone, after writing what this rank knows. `alive` is called with each phase that begins.
    `after`: what to measure after the training steps.
    """
    resumed = None if folder.checkpoint is None else read(folder.checkpoint, recipe)
    device = device or chosen_device()
    check_units(recipe, device)
    run = MeasuredRun(recipe, device, folder, progress, resumed, list(warnings or ()), with_history=snapshot)
    run.alive, run.after = alive or run.alive, after or run.after
    failed: InputError | None = None
    broke: BaseException | None = None
    try:
        try:
            run.to_the_end()
        except (InputError, MemoryError, RuntimeError) as error:
            broke = error  # whose traceback holds the step's tensors
    except KeyboardInterrupt:  # or the ranks' agent ends this one, because another one ended
        if run.training is None:
            raise
    with held_back():
        if broke is not None:
            failed = run.broken_by(broke)
            broke = None
        profile = run.profile()
        if profile.oom is not None and advise is not None and profile.oom.phase not in PHASES_BETWEEN_STEPS:
            profile.oom.advice = advise(recipe, profile.hardware, profile.oom)
        try:
            if snapshot and run.snapshot:
                folder.write_snapshot(run.snapshot)
        except InputError as error:
            failed = failed or error
        if failed is not None:
            profile.warnings.append(str(failed))
        folder.write_profile(profile)
    if failed is not None:
        raise failed
    return profile


def total_steps(recipe: Recipe) -> int:
    """The steps of a whole run: warmup, timed, recorded."""
    return len(step_kinds(recipe))


class MeasuredRun:
    """The state of one measured run, so that what is known so far survives an interruption."""

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        folder: RunFolder,
        progress: Progress,
        resumed: Saved | None,
        warnings: list[str],
        *,
        with_history: bool,
    ) -> None:
        self.recipe, self.device, self.folder, self.progress = recipe, device, folder, progress
        self.resumed, self.warnings = resumed, warnings
        self.total = step_kinds(recipe)
        self.first = 0 if resumed is None else resumed.state.steps_done
        self.losses: list[float | None] = [] if resumed is None else list(resumed.state.losses)
        self.last_checkpoint = None if resumed is None else resumed.path
        if self.first >= len(self.total):
            raise InputError(
                f"--resume: {self.last_checkpoint}: all {len(self.total)} steps of the run are done. "
                f"Give more of them, e.g. steps={2 * recipe.steps}."
            )
        self.kinds = remaining_kinds(self.total, self.first, recipe.warmup_steps)
        # a virtual GPU computes nothing, so there are no losses, and times are estimates or missing
        self.emulated = device.type == "cuda" and emulated_device() is not None
        self.flop_count = FlopCount()
        self.observer = device_observer(device, with_history=with_history, compiled=recipe.compile)
        self.watching: LoopObserver = self.observer
        self.phase_now = "setup"
        self.alive: Callable[[str], None] = lambda doing: None
        self.training: Training | None = None
        self.data: DataSummary | None = None
        self.loss_scale = 0.0
        """GradScaler's scale after the last step."""
        self.communication_s: dict[str, float] = {}
        """Seconds of communication alone by phase; empty where it is not measured."""
        self.after = AfterStep()
        self.evaluation: EvaluationStats | None = None
        self.checkpoint: CheckpointStats | None = None
        self.complete = False
        self.oom: OutOfMemoryReport | None = None
        self.not_finite: NotFiniteReport | None = None
        self.leak: LeakReport | None = None
        self.memory: MemoryStats | None = None
        self.top: list[Allocation] = []
        self.snapshot: dict[str, Any] = {}

    def begin_step(self, index: int, kind: Kind) -> None:
        self.watching.begin_step(index, kind)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phase_now = name
        self.alive(name if name == "setup" else f"{name} of step {len(self.losses) + 1}")
        with self.watching.phase(name):
            yield

    def to_the_end(self) -> None:
        training, batches = set_up(self.recipe, self.device, self)
        if self.resumed is not None:
            with self.phase("setup"):
                restore(self.resumed, self.recipe, training, batches, self.device)
            self.folder.resume_log(self.first)
        self.training = training
        self.data = batches.rows.summary
        if training.scaler is not None:
            self.loss_scale = training.scaler.get_scale()
        self.warnings += _surprises(self.recipe, batches, self.device)
        self.warnings += surprises_of_model(self.recipe, training.model)
        self.observer.trained(training)
        for step in run_steps(training, batches, self.device, self.kinds, self, self.first):
            self.observer.end_step()
            self._note(step, training)
            if self.recipe.checkpoint_every and (step.index + 1) % self.recipe.checkpoint_every == 0:
                self._checkpoint(step, training, batches)
            if self.not_finite is not None and self.recipe.on_nan == "stop":
                return
        self.look_back()
        self._after_the_step(training)
        # FLOPs are counted in one more step, which is not timed and whose memory is not read: counting is
        # slow, and sees only eager code.
        conclude_report()
        self.watching = self.flop_count
        with torch.compiler.set_stance("force_eager"):
            list(run_steps(training, batches, self.device, ["warmup"], self))
        if self.recipe.distributed and self.device.type == "cpu":
            with Communication() as communication:
                self.watching = communication
                list(run_steps(training, batches, self.device, ["warmup"], self))
            self.communication_s = communication.seconds
        self.complete = True

    def _after_the_step(self, training: Training) -> None:
        evaluation = self.after.evaluation
        if evaluation is None and not self.after.checkpoint:
            return
        if evaluation is not None:
            self.evaluation, host_peak = stats_of(evaluation, self.recipe), self.observer.host_peak()
            arguments = self.recipe, training, evaluation, self.device, self
            evaluate_into(self.evaluation, *arguments, torch.cuda.empty_cache, host_peak)
        if self.after.checkpoint:
            whole = self.after.whole_state
            self.checkpoint = measure_checkpoint(
                self.recipe, training, self.folder.path, self, whole_state=whole
            )
        self.snapshot = self.observer.history().snapshot

    def look_back(self) -> MemoryStats:
        """Ask the observer what the memory was, before later steps and frees change the answer."""
        return self._note_steps(look_back(self.observer, ran_out=False))

    def _note_steps(self, found: LookBack) -> MemoryStats:
        self.memory, self.top, self.snapshot = found.memory, found.top, found.history.snapshot
        ends = self.observer.step_end_bytes()
        self.leak = find_leak(ends, found.history.spans, found.history.step_ends)
        return self.memory

    def broken_by(self, error: BaseException) -> InputError | None:
        """Note what ended the run, while the error still holds the step's tensors. Returns the InputError to
        raise after the profile is written; None where memory ran out.

        Raises `error` again before the first step, and where it is not an error that a profile can report.
        """
        if isinstance(error, InputError):  # a log or a checkpoint could not be written: the steps so far
            if not self.losses:  # were not for nothing
                raise error
            return error
        gone = lost_rank(str(error)) if self.recipe.distributed else None
        if gone is None and not is_out_of_memory(error):
            raise error
        self.oom = None if gone else self.observer.shortage(self.phase_now, error)
        known = self.memory is not None  # the steps were over, and what follows them failed
        found = look_back(self.observer, ran_out=self.oom is not None)
        if not known:
            self._note_steps(found)
        self.snapshot = found.history.snapshot
        if self.oom is not None:
            self.oom.top = found.filled
            return None
        return InputError(f"{gone}, in {self.phase_now} after {len(self.losses)} steps.")

    def profile(self) -> StepProfile:
        memory = self.memory or self.look_back()
        if self.resumed is not None:  # the optimizer's state was made before the first step
            memory.first_step_peak_allocated_bytes = None
        hardware = self.observer.hardware(self.recipe.compute_dtype)
        done = len(self.losses) - self.first
        ran = list(zip(self.kinds[:done], self.observer.times_s, strict=False))
        times_s = [times for kind, times in ran if kind == "timed"] if self._has_times() else []
        flop_count = self.flop_count if self.complete else None
        step = step_stats(self.recipe.global_tokens_per_step, hardware, times_s, flop_count)
        step.host_rss_bytes = peak_rss_bytes()
        phases = phase_stats(self.observer.phase_memory(), times_s, flop_count)
        for name, seconds in self.communication_s.items():
            phases[name].communication_s = seconds
        if not self.emulated:
            step.loss, step.gpu_utilization = self.losses, self.observer.utilization()
        return StepProfile(
            source="emulated" if self.emulated else "measured",
            recipe=self.recipe.model_dump(mode="json"),
            hardware=hardware,
            provenance={**provenance(), **self.observer.facts(), **self._what_ran()},
            complete=self.complete,
            memory=memory,
            phases=phases,
            step=step,
            top=self.top,
            oom=self.oom,
            not_finite=self.not_finite,
            leak=self.leak,
            evaluation=self.evaluation,
            checkpoint=self.checkpoint,
            warnings=self.warnings + ([leak_in_words(self.leak)] if self.leak else []),
        )

    def _note(self, step: Step, training: Training) -> None:
        loss = training.ranks.averaged(step.loss)
        self.losses.append(loss if math.isfinite(loss) else None)
        times_s = dict(self.observer.times_s[-1]) if step.kind == "timed" and self._has_times() else {}
        tokens_per_s = self.recipe.global_tokens_per_step / times_s["step"] if times_s else None
        line = log_line(step.index, step.kind, step.num_tokens, None if self.emulated else loss, times_s)
        if not math.isfinite(loss) and not self.emulated:  # of a device that computes nothing it says nothing
            self._went_wrong(step, "forward", str(loss), partial(self._origin_of_loss, step, training))
        if training.scaler is not None:
            line["loss_scale"] = self.loss_scale = training.scaler.get_scale()
        line["peak_allocated_bytes"] = peak_bytes = self.observer.peak_bytes()
        line["peak_reserved_bytes"] = self.observer.peak_reserved_bytes()
        if tokens_per_s is not None:
            line["tokens_per_s"] = tokens_per_s
        self.folder.log(line)
        shown = None if self.emulated else loss
        self.progress.step(step.index, len(self.total), step.kind, shown, tokens_per_s, peak_bytes)

    def _checkpoint(self, step: Step, training: Training, batches: Batches) -> None:
        """Write a checkpoint, unless this step's loss or weights are not finite: the last good one stays."""
        if self.losses[-1] is None and not self.emulated:
            return
        folder = self.folder.path / "checkpoints"
        try:
            self.last_checkpoint = save(folder, self.recipe, training, batches, self.losses, self.device)
        except NotFiniteWeights as found:
            origin = partial(origin_of_weights, training, found.names)
            self._went_wrong(step, "optimizer_step", "not finite", origin)

    def _went_wrong(self, step: Step, phase: str, value: str, origin: Callable[[], Origin]) -> None:
        if self.not_finite is not None:
            self.not_finite.num_steps += 1
            return
        last, made_in = self.last_checkpoint, origin()
        self.not_finite = NotFiniteReport(
            step=step.index,
            phase=phase,
            value=value,
            checkpoint=None if last is None else str(last),
            origin=made_in.phase,
            weights=made_in.weights[:MOST_WEIGHTS],
        )

    def _origin_of_loss(self, step: Step, training: Training) -> Origin:
        scaler, last = training.scaler, self.last_checkpoint
        return origin_of_loss(
            training,
            first=step.index == 0,
            skipped=scaler is not None and scaler.get_scale() < self.loss_scale,
            were_finite=last is not None and steps_done_of(last) == step.index,
        )

    def _has_times(self) -> bool:
        return not self.emulated or has_clock()

    def _what_ran(self) -> dict[str, Any]:
        if self.training is None:
            return {}
        ran: dict[str, Any] = {"attention": attention_kernel(self.training.model)}
        if times := where_times_are_from():
            ran["times"] = times
        if self.data is not None:
            ran["data"] = self.data._asdict()
        if self.complete:
            ran["attention_kernels"] = sorted(self.flop_count.attention)
        if self.recipe.compile and self.device.type == "cpu":
            ran["recorded_steps"] = "eager: the memory of compiled code cannot be followed on a CPU"
        if self.resumed is not None:
            ran["resumed_after_steps"] = self.first
        if self.recipe.distributed:
            ran |= {"host": socket.gethostname(), "data_rank": self.training.ranks.data_rank}
        return ran


def _surprises(recipe: Recipe, batches: Batches, device: torch.device) -> list[str]:
    """Warnings of what the run does differently from what the recipe says."""
    found = []
    if batches.rows.num_skipped:
        found.append(
            f"data: {batches.rows.num_skipped} documents of {recipe.data} were left out: "
            + ("longer than seq_len" if recipe.scores else "within seq_len they have no token to predict")
        )
    if device.type == "cpu" and recipe.pages_optimizer:
        found.append(
            f"optimizer: {recipe.optimizer}: bitsandbytes pages only on a GPU; here its state is not paged"
        )
    return found
