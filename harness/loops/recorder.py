"""The one recorder of watched loops: it is told of steps and phases, and writes a run folder.

Whatever finds the steps (hooks, the user, a trainer's callback) tells it where they and their phases begin
and end. Times and memory come from the observer that `harness run` has (harness/measure). A failure of its
own, such as a full disk, is said once on stderr and ends the watching, never the program.
"""

import math
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.errors import HarnessError, is_out_of_memory
from harness.loops.kept import Kept, tensors_in
from harness.loops.losses import Losses
from harness.loops.memory_of_steps import MemoryOfSteps, Window
from harness.measure import (
    DeviceObserver,
    joining_observer,
    log_line,
    peak_rss_bytes,
    phase_stats,
    step_stats,
)
from harness.observe import labelled_tensors
from harness.run_folder import RunFolder, folder_of_rank
from harness.step_profile import NotFiniteReport, OutOfMemoryReport, PhaseStats, StepProfile, explain_oom
from harness.system import complain, held_back, provenance
from harness.training import Kind
from harness.virtual_gpu import emulated_device, where_times_are_from

MOST_TIMES = 1000
"""How many timed steps, the last ones, have their times in the profile. All are in the log."""
MOST_LOSSES = 100_000
"""How many losses the profile holds at most: those of a longer run are in the log only."""
RUNNING = 2
"""How many steps a GPU may be behind: times and losses are read that much later, without waiting."""
FIRST_STEPS = 2
"""How many of the first steps may peak highest: the second is the first one with the optimizer's state."""
NO_PART_OF_A_STEP = ("evaluation", "saving")
"""Phases that may come within a step and do not count in its time."""


def rank_and_world_size() -> tuple[int, int]:
    """Which of several ranks this process is, by torch.distributed or torchrun's variables; (0, 1) for a
    process of its own."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world)) if rank.isdecimal() and world.isdecimal() else (0, 1)


def own_folder(run: Path) -> Path:
    """This process's folder: `run`, or on one of several ranks the rank's folder in it."""
    rank, world_size = rank_and_world_size()
    return folder_of_rank(run, rank) if world_size > 1 else run


class LoopRecorder:
    """Records the steps and phases of one process."""

    def __init__(self, folder: RunFolder, command: Sequence[str], window: Window = Window()) -> None:  # noqa: B008
        self.folder, self.command, self.window = folder, list(command), window
        self.kept = Kept()
        self.phase = "setup"
        """The phase that runs, or that ran last."""
        self.steps = 0
        """How many steps have begun."""
        self.over = False
        """Whether the recording is finished, or was given up."""
        self._observer: DeviceObserver | None = None
        self._open: AbstractContextManager[None] | None = None
        """The observer's context of the phase that runs."""
        self._losses = Losses()
        self._tokens = 0
        self._rows: int | None = None
        """The rows of the batch that a model was last called with."""
        self._waiting: deque[tuple[int, Kind, int | None, dict[str, float], Any]] = deque()
        """Steps that are not yet in the log: index, kind, tokens, seconds by phase, losses."""
        self._times_s: deque[dict[str, float]] = deque(maxlen=MOST_TIMES)
        self._tokens_of_steps: deque[int | None] = deque(maxlen=MOST_TIMES)
        self._values: list[float | None] = []
        self._oom: OutOfMemoryReport | None = None
        self._not_finite: NotFiniteReport | None = None
        self._warnings: list[str] = []
        self._facts: dict[str, Any] = {}
        self._classes: dict[str, list[str]] = {"models": [], "optimizers": []}

    # What happens in the loop.

    def begin_step(self) -> None:
        """A step begins; `enter` then says in which phase."""
        self._leave()
        if self._observer is None:
            self._observer = joining_observer(self.kept.model.parameters())
            self._observer.trained(self.kept)
            self._hardware = self._observer.hardware("bf16")
            self._emulated = self._hardware.kind == "cuda" and emulated_device() is not None
            self._facts = {**provenance(), **self._observer.facts()}
            self._memory = MemoryOfSteps(self._observer, self.folder, self.window)
        elif self.steps == self.window.last:
            self._memory.look_back_at_window(self.steps)
            self._write(complete=False)
        self.steps += 1
        in_window = self.window.first <= self.steps <= self.window.last
        self._kind: Kind = "recorded" if in_window else "warmup" if self.steps == 1 else "timed"
        self._observer.begin_step(self.steps - 1, "warmup" if self._followed else self._kind)
        if self._kind == "recorded" or self._followed:
            for gradient in self.kept.gradients():  # of steps before, not yet set to none
                self._observer.label("gradients", gradient)

    def enter(self, phase: str) -> None:
        """`phase` begins, and lasts until another one begins or the step ends."""
        running = self._open
        if (running is not None and phase == self.phase) or self._observer is None:
            return
        if running is not None:
            self._open = None
            running.__exit__(None, None, None)
        self.phase = phase
        if phase == "between" and (self._kind != "timed" or self._followed):
            self._note_classes()
            self._label_what_stays()
        self._open = begun = self._observer.phase(phase)
        begun.__enter__()

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Inside the block it is `phase`; afterwards the phase before goes on."""
        before = self.phase if self._open is not None else None
        self.enter(phase)
        yield
        if before is not None:
            self.enter(before)

    def end_step(self) -> None:
        """The step is over: the optimizer has stepped, and what belongs to its step is done."""
        assert self._observer is not None
        self._leave()
        timed = self._kind == "timed"
        if not timed or self._followed:
            self._label_what_stays()
        self._observer.end_step(RUNNING if timed else 0)
        if self._memory.is_highest(self.steps) and self._followed:
            self._memory.look_back(f"{self.steps}")
        tokens, self._tokens = self._tokens or None, 0
        # a virtual device's clock is not slowed by the recording of a history
        times_s = self._observer.times_s[-1] if timed or self._emulated else {}
        self._waiting.append((self.steps - 1, self._kind, tokens, times_s, self._losses.of_step()))
        self._log(everything=not timed)
        if self._kind == "recorded" or self.steps == 1:
            self._write(complete=False)  # a program that is killed later leaves this much

    def _label_what_stays(self) -> None:
        """Label parameters and optimizer state now: when the program ends they may be gone or on the host."""
        assert self._observer is not None
        for category, tensor in labelled_tensors(self.kept):
            self._observer.label(category, tensor)

    def inputs(self, *values: Any) -> None:
        """Note what a model was called with: its tensors are inputs, and its token ids are counted."""
        if self._observer is None:
            return
        if self._kind == "recorded" or self._followed:
            for tensor in tensors_in(*values):
                if not tensor.requires_grad:
                    self._observer.label("inputs", tensor)
        self._rows = next((len(tensor) for tensor in tensors_in(*values) if tensor.dim() > 1), None)
        if self.phase != "forward":
            return
        of_ids = (torch.int64, torch.int32)
        ids = next((t for t in tensors_in(*values) if t.dtype in of_ids and t.dim() == 2), None)
        self._tokens += 0 if ids is None else ids.numel()

    def loss(self, value: Tensor) -> None:
        """Note the value that backward begins at, before a scaler scales it."""
        if self._observer is not None and not self._emulated:
            self._losses.add(value)

    # How it ends.

    def failed(self, error: BaseException) -> None:
        """The program dies of `error`; its traceback still holds the step's tensors."""
        if self._observer is None or self.over:
            return
        with self._giving_up():
            if is_out_of_memory(error):
                with held_back():
                    self._oom = self._observer.shortage(self.phase, error)
                    self._leave()
                    found = self._memory.look_back(f"{self.steps}", ran_out=True)
                    self._oom.top, self._oom.batch_rows = found.filled, self._rows
                    held = found.held
                    self._oom.batch_bytes = (held.inputs_bytes or 0) + (held.activations_bytes or 0)
            else:
                kind = type(error).__name__
                self._warnings.append(
                    f"the program ended in step {self.steps}, in its phase {self.phase}: {kind}"
                )
            self.finish(complete=False)

    def finish(self, *, complete: bool = True, unfinished: bool = False) -> None:
        """Write the profile for the last time. `unfinished`: the last step that began has not ended."""
        if self.over or self._observer is None:
            return
        with self._giving_up(), held_back():
            if complete and not unfinished:
                self.end_step()
            self._leave()
            self._log(everything=True)
            done = self.steps - (unfinished or not complete)
            if done < self.window.last:
                # otherwise the program died in a step whose memory is known
                if complete or (self.steps < self.window.first and not (self._oom and self._followed)):
                    window = f"{self.window.first}-{self.window.last}"
                    others = f" Give others, e.g. --steps {done}." if done else ""
                    self._warnings.append(
                        f"the loop ended after {done} steps, and steps {window} were to be recorded.{others}"
                    )
                complete &= done >= self.window.first  # a loop that ended by itself: its steps were like this
            if self._kind == "recorded" and self._oom is None:
                self._memory.look_back_at_window(self.steps)
            elif self._memory.looked is None or (self._memory.is_highest(self.steps) and self._followed):
                self._memory.look_back(f"{self.steps}")
            profile = self._write(complete=complete, last=True)
            self.over = True
            if profile.oom is not None:
                # `harness watch` explains it below all that the program prints
                by_command = "HARNESS_WATCH" in os.environ
                short = f"out of memory in {profile.oom.phase}, explained at the end."
                complain(f"{short if by_command else explain_oom(profile)} Run folder: {self.folder.path}", 1)

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Inside, an error of our own, such as a full disk, ends the watching."""
        try:
            yield
        except HarnessError as our_own:
            self.give_up(our_own)

    def give_up(self, error: BaseException) -> None:
        """End the watching for a failure of its own, and say so; the program goes on."""
        if self.over:
            return
        self.over = True
        self._leave()
        message = str(error) if isinstance(error, HarnessError) else f"{type(error).__name__}: {error}"
        complain(f"watching ends here, the program goes on: {message}", 1)

    # What becomes of it.

    @property
    def _followed(self) -> bool:
        """Whether this step has a history though it is not one of the window's, in case it peaks highest or
        runs out of memory: the first two steps, where that happens most, and on a virtual GPU, whose clock a
        history does not slow, every step.
        """
        assert self._observer is not None
        if self._kind == "recorded" or self._hardware.kind != "cuda":
            return False
        return self._emulated or (self.steps <= FIRST_STEPS and self.steps < self.window.first)

    def _leave(self) -> None:
        if self._open is not None:
            ended, self._open = self._open, None
            ended.__exit__(None, None, None)

    def _log(self, *, everything: bool) -> None:
        """Write a line for each step whose times are known; with `everything`, wait for all of them."""
        assert self._observer is not None
        while self._waiting:
            index, kind, tokens, times_s, losses = self._waiting[0]
            if kind == "timed" and not self._emulated and "step" not in times_s:
                if not everything:
                    return
                self._observer.end_step()
            self._waiting.popleft()
            loss = self._losses.value(losses)
            known = dict(times_s)
            times_s.clear()
            if known.pop("step", None) is not None and known:
                apart = sum([known[name] for name in NO_PART_OF_A_STEP if name in known])
                known["step"] = sum(known.values()) - apart
                self._times_s.append(known)
                self._tokens_of_steps.append(tokens)
            self._note_loss(index, loss)
            line = log_line(index, kind, tokens, loss, known)
            self.folder.log({**line, "peak_allocated_bytes": self._observer.peak_bytes()})

    def _note_loss(self, index: int, loss: float | None) -> None:
        if len(self._values) <= MOST_LOSSES:
            self._values.append(loss if loss is not None and math.isfinite(loss) else None)
        if loss is None or math.isfinite(loss):
            return
        if self._not_finite is None:
            self._not_finite = NotFiniteReport(step=index, phase="forward", value=str(loss))
        else:
            self._not_finite.num_steps += 1

    def _write(self, *, complete: bool, last: bool = False) -> StepProfile:
        profile = self._profile(complete)
        self.folder.write_profile(profile, last=last)
        return profile

    def _profile(self, complete: bool) -> StepProfile:
        assert self._observer is not None
        memory, warnings = self._memory.known(self.steps)
        memory_of = dict(self._observer.phase_memory())
        for name, apart in self._observer.apart_memory().items():
            peak = apart.peak_allocated_bytes or 0
            known = memory_of.get(name, PhaseStats())
            memory_of[name] = known.model_copy(
                update={"peak_allocated_bytes": max(peak, known.peak_allocated_bytes or 0)}
            )
        phases = phase_stats(memory_of, list(self._times_s), None)
        tokens = [count for count in self._tokens_of_steps if count is not None]
        typical = sorted(tokens)[len(tokens) // 2] if tokens else None
        step = step_stats(typical, self._hardware, list(self._times_s), None)
        step.host_rss_bytes = peak_rss_bytes()
        if not self._emulated and any(value is not None for value in self._values):
            step.loss = self._values if len(self._values) <= MOST_LOSSES else None
            step.gpu_utilization = self._observer.utilization()
        return StepProfile(
            source="emulated" if self._emulated else "measured",
            command=self.command,
            hardware=self._hardware,
            provenance={**self._facts, **self._about()},
            complete=complete,
            memory=memory,
            phases={name: stats for name, stats in phases.items() if stats != type(stats)()},
            step=step,
            top=[] if self._memory.looked is None else self._memory.looked.top,
            oom=self._oom,
            not_finite=self._not_finite,
            leak=self._memory.leak,
            warnings=[*self._warnings, *warnings],
        )

    def _about(self) -> dict[str, Any]:
        rank, world_size = rank_and_world_size()
        place = {"rank": rank, "world_size": world_size, "host": socket.gethostname()}
        return {
            "python_command": sys.orig_argv[:1],
            "recorded_steps": f"{self.window.first}-{self.window.last}",
            **self._note_classes(),
            **({"times": times} if (times := where_times_are_from(with_host=False)) else {}),
            **(place if world_size > 1 else {}),
        }

    def _note_classes(self) -> dict[str, list[str]]:
        """Note the class names of models and optimizers, the most that existed at one time: when the program
        ends they may be gone.
        """
        for name, seen in (("models", self.kept.models()), ("optimizers", self.kept.optimizers())):
            self._classes[name] = max(self._classes[name], [type(one).__name__ for one in seen], key=len)
        return self._classes
