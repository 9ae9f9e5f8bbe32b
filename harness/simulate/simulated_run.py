"""The simulation of a recipe: the training step that is measured, on shape-only tensors, for a given GPU.

Storages are placed by a model of the CUDA caching allocator, and the time of operators is estimated. What
CUDA does differently from a shape-only run is in simulate/cuda/behaviour.py and nowhere else.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice

import torch
from torch import Tensor

from harness.allocator import AllocatorOutOfMemory, Settings, parse_settings
from harness.errors import InputError
from harness.formula import Times
from harness.hardware import PLENTY_BYTES, Hardware, with_memory
from harness.kernel_time import where_from
from harness.kernels import unasked_tables, unknown_ops
from harness.observe import PhasePeaks, failed_request, gradients_seen, labelled_tensors, owned_tensors
from harness.recipe import Recipe, surprises_of_mesh
from harness.simulate.checkpoint import simulate_checkpoint
from harness.simulate.clock import SimulatedTime, step_of, times_of
from harness.simulate.cuda.behaviour import CudaRules, cuda_behaviour
from harness.simulate.cuda.communication import Communication
from harness.simulate.cuda.libraries import import_bitsandbytes_fast
from harness.simulate.cuda.one_rank import one_rank
from harness.simulate.cuda.streams import Streams
from harness.simulate.device import SimulatedDevice
from harness.simulate.memory import SimulatedMemory
from harness.simulate.micro_batches import in_short
from harness.simulate.module_paths import ModulePaths
from harness.snapshot import BEFORE_RECORDING, breakdown_at, bytes_by_module, find_peak, top_allocations
from harness.step_profile import (
    PHASES,
    PHASES_BETWEEN_STEPS,
    Allocation,
    CheckpointStats,
    EvaluationStats,
    HardwareSummary,
    MemoryBreakdown,
    MemoryStats,
    OutOfMemoryReport,
    StepProfile,
    StepStats,
)
from harness.system import collected_by_hand, older_objects_kept, provenance
from harness.training import (
    TOO_LARGE,
    AfterStep,
    Batches,
    Kind,
    StepBatches,
    Training,
    evaluate_into,
    import_libraries,
    run_steps,
    set_up,
    stats_of,
    surprises_of_model,
    undisturbed,
)

STEPS = 2
"""Steps that are simulated. The first makes the optimizer's state, the second is steady: a third does the
same, as the tests show."""
DDP_STEPS = 3
"""The same for DDP, whose second step reorders its buckets by the order of the first step's gradients."""
META = torch.device("meta")


def simulate(
    recipe: Recipe,
    hardware: Hardware,
    settings: Settings | None = None,
    *,
    rank: int = 0,
    after: AfterStep | None = None,
    explain_oom: bool = True,
    repeat: bool = True,
    beside: Sequence[SimulatedTime] = (),
    advise: Callable[[Recipe, HardwareSummary, OutOfMemoryReport], list[str]] | None = None,
) -> tuple[StepProfile, SimulatedMemory]:
    """The StepProfile of `recipe` on `hardware`, and the simulated memory with its snapshot and log.

    Of a recipe for several ranks, `rank` alone is simulated. `after` is what to simulate after the training
    steps, and `beside` are clocks of other devices that run with it. Running out of memory gives a profile
    with `oom` filled; with `explain_oom` the run is then simulated again, to keep the stack and the module of
    everything that is live, and `advise` says what to change. Without `repeat` the profile is that of the
    simulated steps, without stacks, and not of all steps of a measurement. Raises InputError for a dtype or
    attention that the device does not have, and for `compile`.
    """
    hardware.check(recipe)
    if not 0 <= rank < recipe.world_size:
        there = f"ranks 0 to {recipe.world_size - 1}" if recipe.world_size > 1 else "rank 0 alone"
        raise InputError(
            f"--rank {rank}: the recipe has {there}. Set parallel and dp_shard, dp_replicate or tp for more."
        )
    if recipe.compile:
        raise InputError(
            "compile: true cannot be simulated: the compiler decides which kernels and buffers there are. "
            "Set compile: false, or ask `harness napkin`."
        )
    settings = settings or parse_settings("", torch.__version__)
    with collected_by_hand(), undisturbed():
        import_everything(recipe)
        with older_objects_kept():
            run = SimulatedRun(recipe, hardware, settings, rank, after, beside)
            run.repeats = repeat
            profile = run.to_the_end()
            if profile.oom is not None and explain_oom:
                run = SimulatedRun(recipe, hardware, settings, rank, after)
                run.device.recorded = run.device.frames = True
                profile = run.to_the_end()
    if profile.oom is not None and advise is not None and profile.oom.phase not in PHASES_BETWEEN_STEPS:
        profile.oom.advice = advise(recipe, profile.hardware, profile.oom)
    return profile, run.memory


def import_everything(recipe: Recipe) -> None:
    """Import all that a simulation of `recipe` imports, before processes are forked that all need it."""
    import_bitsandbytes_fast()
    import_libraries(recipe)


def simulate_for_devices(
    recipe: Recipe, devices: Sequence[Hardware], settings: Settings
) -> tuple[StepProfile, SimulatedMemory, dict[str, Times]]:
    """Simulate the step on the first of `devices`, which all run the same kernels, with plenty of memory.

    Returns profile, memory, and the step's times on each device by name. Raises InputError as `simulate`."""
    beside: dict[str, SimulatedTime] = {other.name: SimulatedTime(other) for other in devices[1:]}
    plenty, clocks = with_memory(devices[0], PLENTY_BYTES), [*beside.values()]
    profile, memory = simulate(recipe, plenty, settings, explain_oom=False, repeat=False, beside=clocks)
    times = {name: times_of(recipe, clock) for name, clock in beside.items()}
    return profile, memory, {devices[0].name: Times.of(profile), **times}


class SimulatedRun:
    """One simulation of a recipe: an observer of the training loop that collects what the profile says."""

    def __init__(
        self,
        recipe: Recipe,
        hardware: Hardware,
        settings: Settings,
        rank: int = 0,
        after: AfterStep | None = None,
        beside: Sequence[SimulatedTime] = (),
    ) -> None:
        # The values do not matter and nothing needs to be read: shapes are the same for any data.
        self.recipe = recipe.model_copy(update={"data": "synthetic"})
        self.given_recipe, self.hardware = recipe, hardware
        self.rank = rank
        self.num_steps = DDP_STEPS if recipe.ddp else STEPS
        self.steps_beyond = max(0, recipe.measured_steps - self.num_steps)
        """How many more steps a measurement has than are simulated."""
        self.repeats = True
        """Whether the memory of those steps is found by repeating the requests of the last simulated one."""
        context = hardware.calibration.cuda_context_bytes
        self.memory = SimulatedMemory(settings, hardware.memory_bytes - context, hardware.memory_bytes)
        self.time = SimulatedTime(hardware)
        self.paths = ModulePaths()
        self.rules = CudaRules(recipe, hardware, self.memory.empty_cache, self.memory.ruled)
        self.communication = Communication(self.time, *beside)
        self.device = SimulatedDevice(
            self.memory, self.rules, self.time, self.paths, self.communication, beside
        )
        self.rules.synchronize = self.device.synchronize
        self.kinds: list[Kind] = []
        self.peaks = PhasePeaks()
        self.phases = self.peaks.phases
        self.training: Training | None = None
        self.at_oom: MemoryBreakdown | None = None
        self.after = after or AfterStep()
        self.evaluation: EvaluationStats | None = None
        self.checkpoint: CheckpointStats | None = None
        self.lost_bytes = 0
        """The bytes that each step allocates and nobody ever frees."""
        self.of_the_step: tuple[MemoryStats, StepStats, list[Allocation]] | None = None
        """What the profile says of the steps; None until they are over."""

    def to_the_end(self) -> StepProfile:
        """Run the whole simulation, and return its profile."""
        oom = None
        with cuda_behaviour(self.rules), self._among_ranks(), self.paths.watching(), self.device:
            try:
                training, batches = set_up(self.recipe, META, self)
                self.training = in_short(training, self.recipe, self.memory, self.device.clocks)
                self.paths.name(self.training.model)
                kinds: list[Kind] = [*["warmup"] * (self.num_steps - 1), "recorded"]  # type: ignore[list-item]
                for _ in run_steps(self.training, self._measured(batches), META, kinds, self):
                    self.paths.forget()
                self._repeat_the_step()
                self.of_the_step = self._memory(), step_of(self.recipe, self.time), self._top()
                self._after_the_step()
            except AllocatorOutOfMemory as error:
                oom = self._oom(error)
            except RuntimeError as error:
                if TOO_LARGE not in str(error):
                    raise
                rows, seq_len = self.recipe.micro_batch_size, self.recipe.seq_len
                raise InputError(
                    f"micro_batch_size: {rows} and seq_len: {seq_len} ask for a tensor of more than 2^63 "
                    f"bytes in {self.memory.phase}. Set smaller ones."
                ) from None
            self.memory.ended = True
            profile = self._profile(oom)
        return profile

    def _among_ranks(self) -> AbstractContextManager[None]:
        if not self.recipe.distributed:
            return nullcontext()
        streams = Streams(self.memory, *self.device.clocks)
        return one_rank(self.rank, self.recipe.world_size, streams, self.communication)

    def begin_step(self, index: int, kind: Kind) -> None:
        self.kinds.append(kind)
        self.memory.begin_step()
        for clock in self.device.clocks:
            clock.begin_step()
        self.communication.begin_step()
        if kind == "recorded":
            gc.collect()  # or what earlier steps left in reference cycles dies at some moment of this one
            self._label_what_stays()
            self.memory.restart()
            self.device.recorded = True
            self.device.frames = self.repeats or self.recipe.distributed  # what FSDP gathers, its stack shows

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.memory.phase = name
        self.memory.reset_peak()
        for clock in self.device.clocks:
            clock.begin_phase(name)
        try:
            with gradients_seen(self.training, name, self._label_gradient), self.device.host_followed():
                yield
        finally:
            for clock in self.device.clocks:
                clock.end_phase()
            self._note(name)
            self.memory.end_phase()

    def _measured(self, batches: Batches) -> Iterator[StepBatches]:
        """The batches of a measurement's first steps and of its last one, which is the recorded step."""
        yield from islice(batches, self.num_steps - 1)
        batches.skip(self.steps_beyond)
        yield from batches

    def _repeat_the_step(self) -> None:
        """Raise the peaks to those of a measurement's further steps, which repeat the recorded one."""
        lost = {self.device.key_of(tensor): tensor.nbytes for tensor in self.communication.not_waited}
        self.lost_bytes = sum(lost.values()) // self.num_steps
        self.memory.lose(key for key in lost if key is not None and self.steps_beyond)
        peaks = self.memory.repeat(self.repeats * self.steps_beyond)
        for name, (allocated, reserved) in peaks.items():
            stats = self.phases[name]
            stats.peak_allocated_bytes = max(stats.peak_allocated_bytes or 0, allocated)
            stats.peak_reserved_bytes = max(stats.peak_reserved_bytes or 0, reserved)

    def _after_the_step(self) -> None:
        evaluation, training = self.after.evaluation, self.training
        assert training is not None
        if evaluation is None and not self.after.checkpoint:
            return
        self.memory.go_on_recording()
        if evaluation is not None:
            self.evaluation = stats_of(evaluation, self.recipe)
            empty_cache, host_peak = self.rules.empty_cache, self.memory.host_peak()
            arguments = self.recipe, training, evaluation, META, self
            evaluate_into(self.evaluation, *arguments, empty_cache, host_peak)
        if self.after.checkpoint:
            whole = self.after.whole_state
            self.checkpoint = simulate_checkpoint(self.recipe, training, self.device, self, whole_state=whole)

    def _label_what_stays(self) -> None:
        """Give tensors of the training their category and module: weights, optimizer state and the like."""
        assert self.training is not None
        for category, tensor in labelled_tensors(self.training):
            self.memory.label(self.device.adopt(tensor), category)
        for module, tensor in owned_tensors(self.training):
            self.memory.own(self.device.key_of(tensor), module)

    def _label_gradient(self, weight: Tensor) -> None:
        if weight.grad is not None:
            self.memory.label(self.device.key_of(weight.grad), "gradients")

    def _note(self, name: str) -> None:
        memory = self.memory
        peaks = memory.peak_bytes, memory.allocated_bytes, memory.peak_reserved_bytes
        stats = self.peaks.note(name, self.kinds, *peaks)
        if stats is not None:
            self.time.tell(stats, name, distributed=self.recipe.distributed)

    def _oom(self, error: AllocatorOutOfMemory) -> OutOfMemoryReport:
        """The report of an out-of-memory, with what is live now: the traceback still holds the tensors."""
        live = list(self.memory.live_spans())
        if self.training is None:  # setup builds nothing but the model
            for span in live:
                span.category = "parameters"
        else:
            self._label_what_stays()
            for parameter in self.training.model.parameters():
                self._label_gradient(parameter)
        now = max((span.born for span in live), default=BEFORE_RECORDING)
        self.at_oom = breakdown_at(live, now)
        not_split_off = self.memory.allocated_bytes - self.at_oom.total_bytes()
        if not_split_off:  # in a repeated step other blocks may serve the same requests
            self.at_oom.other_bytes = (self.at_oom.other_bytes or 0) + not_split_off
        return OutOfMemoryReport(
            phase=self.memory.phase,
            **failed_request(error, error.requested_bytes),
            free_bytes=max(0, error.free_bytes),
            reserved_unallocated_bytes=error.reserved_unallocated_bytes,
            top=top_allocations(live, now),
        )

    def _profile(self, oom: OutOfMemoryReport | None) -> StepProfile:
        memory, step, top = self.of_the_step or (self._memory(), StepStats(), [])
        return StepProfile(
            source="simulated",
            recipe=self.given_recipe.model_dump(mode="json"),
            hardware=self.hardware.summary(self.recipe.compute_dtype),
            provenance={
                **provenance(),
                "calibration": where_from(self.hardware),
                "allocator": str(self.memory.settings),
                "attention_kernels": sorted(self.rules.attention_kernels),
                **({"rank": self.rank} if self.recipe.distributed else {}),
            },
            complete=oom is None,
            warnings=self._warnings(),
            memory=memory,
            phases={name: self.phases[name] for name in PHASES + PHASES_BETWEEN_STEPS if name in self.phases},
            step=step,
            top=top,
            oom=oom,
            evaluation=self.evaluation,
            checkpoint=self.checkpoint,
        )

    def _top(self) -> list[Allocation]:
        """The largest allocations at the peak of the step."""
        spans = self.memory.spans
        return top_allocations(spans, find_peak(spans).index) if spans else []

    def _warnings(self) -> list[str]:
        warnings = surprises_of_mesh(self.given_recipe)
        if self.training is not None:
            warnings += surprises_of_model(self.given_recipe, self.training.model)
        if unknown := unknown_ops(self.device.operators):
            warnings.append(
                f"what these operators take inside on CUDA nobody has looked at: {', '.join(unknown)}"
            )
        warnings += unasked_tables(self.device.operators) + self.memory.surprises()
        if self.lost_bytes:
            warnings.append(
                f"every step loses {self.lost_bytes / 2**20:.1f} MiB, which PyTorch never frees: sums of tp "
                "ranks that a recomputed block starts and does not wait for. A long run ends out of memory. "
                "Set gradient_checkpointing: false"
            )
        context = self.hardware.calibration.cuda_context_bytes
        whole = self.memory.peak_reserved_bytes + context + self.memory.host_peak_bytes
        if self.recipe.pages_optimizer and whole > self.hardware.memory_bytes:
            warnings.append(
                "it fits only where the driver moves the optimizer's state, which is in unified memory, to "
                "the host when the device is full: on Linux it does, on Windows and WSL it does not"
            )
        return warnings

    def _memory(self) -> MemoryStats:
        memory = MemoryStats(
            kind="simulated_allocator",
            host_bytes=self.memory.host_peak_bytes or None,
            cuda_context_bytes=self.hardware.calibration.cuda_context_bytes,
            setup_peak_allocated_bytes=self.peaks.setup_bytes,
            first_step_peak_allocated_bytes=self.peaks.first_step_bytes,
        )
        if self.phases:
            memory.peak_phase = max(self.phases, key=lambda name: self.phases[name].peak_allocated_bytes or 0)
            memory.peak_allocated_bytes = self.phases[memory.peak_phase].peak_allocated_bytes
        if self.at_oom is not None:
            memory.peak_reserved_bytes = self.memory.peak_reserved_bytes
            if self.at_oom.total_bytes() >= (memory.peak_allocated_bytes or 0):
                memory.at_peak, memory.peak_phase = self.at_oom, self.memory.phase
                memory.peak_allocated_bytes = self.at_oom.total_bytes()
                return memory
        else:
            memory.peak_reserved_bytes = max(stats.peak_reserved_bytes or 0 for stats in self.phases.values())
            memory.process_bytes = memory.peak_reserved_bytes + self.hardware.calibration.cuda_context_bytes
            memory.fragmentation_bytes = memory.peak_reserved_bytes - (memory.peak_allocated_bytes or 0)
        peak = find_peak(self.memory.spans, leave_out=("setup",)).index
        memory.at_peak = breakdown_at(self.memory.spans, peak)
        not_split_off = (memory.peak_allocated_bytes or 0) - memory.at_peak.total_bytes()
        memory.at_peak.other_bytes = (memory.at_peak.other_bytes or 0) + not_split_off
        memory.at_peak_by_module = bytes_by_module(self.memory.spans, peak)
        return memory
