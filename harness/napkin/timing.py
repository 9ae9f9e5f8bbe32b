"""Time of a step by phase: FLOPs and bytes of every operator over the device's ceilings. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from harness.hardware import Bound, Time, Work, transfer_s
from harness.kernel_time import time_of
from harness.napkin.memory.optimizer import step_work
from harness.napkin.memory.sizes import Sizes
from harness.napkin.ranks.traffic import traffic
from harness.napkin.tape.stages import Stage
from harness.step_profile import utilization


@dataclass(frozen=True)
class PhaseTime:
    """One phase of the whole optimizer step, all its micro batches together."""

    name: str
    works: list[Work]
    transfer_bytes: int
    """Moved over the host link while the device computes."""
    transfer_s: float
    time: Time
    recomputed_flops: int = 0
    waited_s: float = 0.0
    """For transfers that the device waits for: nothing else is there to do."""
    host_step_s: float = 0.0
    """The host's own work on what is in its memory."""
    sent_s: float = 0.0
    """Sending to other ranks, under what computes."""
    shown_s: float = 0.0
    """Of that, what nothing computes under."""
    sending_share: float = 1.0
    """Of the phase's computing, what can hide it: without syncing each micro batch, the last one's."""

    @property
    def flops(self) -> int:
        """FLOPs of the phase, recomputation included."""
        return sum(work.flops for work in self.works)

    @property
    def bytes_moved(self) -> int:
        """Bytes read from and written to device memory."""
        return sum(work.bytes_moved for work in self.works)

    @property
    def seconds(self) -> float:
        """Compute and transfers overlap; the host's own work overlaps with neither."""
        return max(self.time.seconds + self.waited_s, self.transfer_s) + self.host_step_s + self.exposed_s

    @property
    def exposed_s(self) -> float:
        """What the phase waits for other ranks."""
        hidden = self.sent_s - self.shown_s
        return self.shown_s + max(0.0, hidden - self.time.seconds * self.sending_share)


class Timing:
    """The phases of one optimizer step."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.recipe, self.hardware = sizes, sizes.recipe, sizes.hardware

    @cached_property
    def phases(self) -> dict[str, PhaseTime]:
        """data, forward, backward, optimizer_step."""
        phases = {
            "data": self._data(),
            "forward": self._forward(),
            "backward": self._backward(),
            "optimizer_step": self._step(),
        }
        for name, all_sent in traffic(self.sizes).items():
            phases[name] = replace(
                phases[name],
                sent_s=sum(sent.sent / sent.link for sent in all_sent),
                shown_s=sum(sent.exposed / sent.link for sent in all_sent),
                # what is exposed in full needs nothing to hide it
                sending_share=min((sent.times for sent in all_sent), default=1) / self.sizes.micro_batches,
            )
        return phases

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def model_flops(self) -> int:
        """FLOPs of forward and backward without recomputation: what MFU counts."""
        return self.hardware_flops - self.phases["backward"].recomputed_flops

    @property
    def hardware_flops(self) -> int:
        """FLOPs of forward and backward with recomputation: what HFU counts."""
        return self.phases["forward"].flops + self.phases["backward"].flops

    @property
    def works(self) -> list[Work]:
        """Every operator of the step."""
        return [work for phase in self.phases.values() for work in phase.works]

    @property
    def bound(self) -> Bound:
        """What most of the step waits for: matrix products, device memory, or the host and the links."""
        phases = self.phases.values()
        device, computing = (sum(p.time.device_s for p in phases), sum(p.time.computing_s for p in phases))
        waited: dict[Bound, float] = {
            "compute": computing,
            "memory": device - computing,
            "host": self.seconds - device,
        }
        return max(waited, key=lambda cause: waited[cause])

    @property
    def tokens_per_s(self) -> float:
        return self.recipe.tokens_per_step / self.seconds

    def utilization(self, flops: int) -> float:
        """`flops` over what the device could do in the time of the step."""
        peak = self.hardware.peak_flops(self.recipe.compute_dtype)
        return utilization(flops, self.seconds, peak) or 0.0

    def _phase(self, name: str, works: list[Work], transfer: int, recomputed: int = 0) -> PhaseTime:
        works = [self._launched(work) for work in works]
        seconds = transfer_s(transfer, self.hardware)
        return PhaseTime(name, works, transfer, seconds, time_of(works, self.hardware), recomputed)

    def _launched(self, work: Work) -> Work:
        """A compiled graph is launched by one call: the host is not in the way."""
        return replace(work, operators=0) if self.sizes.stages.loss.tape.compiled else work

    def _data(self) -> PhaseTime:
        inputs = self.sizes.input_bytes
        return self._phase("data", [Work(0, inputs, 2 * self.sizes.micro_batches)], inputs)

    def _forward(self) -> PhaseTime:
        sizes, stages, times = self.sizes, self.sizes.stages, self.sizes.micro_batches
        works = [op.forward.times(s.count * times) for s in stages.all for op in s.tape.ops]
        if stages.head.fused:
            works.append(stages.head.fused.work.times(times))
        leaves = sizes.kept_in_forward - sizes.kept_by_ctx if self.recipe.activations_on_host else 0
        phase = self._phase("forward", works, times * (leaves + self._parameters_in()))
        # after the loss nothing is left to compute while what it keeps leaves
        at_the_end = stages.loss.kept + sizes.fused_loss_bytes if leaves else 0
        return replace(phase, waited_s=transfer_s(times * at_the_end, self.hardware))

    def _backward(self) -> PhaseTime:
        works: list[Work] = []
        recomputed = 0
        for stage in self.sizes.stages.all:
            times = stage.count * self.sizes.micro_batches
            again = [op.forward.times(times) for op in stage.recomputed]
            recomputed += sum(work.flops for work in again)
            works += again
            works += [op.backward.times(times) for op in stage.tape.ops]
            works.append(_added_gradients(stage).times(times))
        earlier = self.sizes.micro_batches - 1
        tensors = sum(weight.count for weight in self.sizes.trained)
        on_host = self.recipe.parameters_on_host
        added = 3 * self.sizes.gradient_bytes * earlier
        works.append(Work(0, 0 if on_host else added, tensors * earlier))
        if self.sizes.optimizer.in_backward:
            works += step_work(self.recipe, self.sizes.trained)
        fetched, again = self._fetched()
        times = self.sizes.micro_batches
        phase = self._phase("backward", works, times * (fetched + again + self._parameters_in()), recomputed)
        leaves = self.sizes.gradient_bytes if on_host else 0
        at_the_start = self.sizes.stages.loss.kept + self.sizes.fused_loss_bytes if fetched else 0
        waited_s = transfer_s(times * (leaves + again + at_the_start), self.hardware)
        host_s = added / self.hardware.calibration.host_memory_bandwidth if on_host else 0.0
        return replace(phase, waited_s=waited_s, host_step_s=host_s)

    def _parameters_in(self) -> int:
        """Bytes of parameters that come in for one forward or backward pass."""
        return self.sizes.parameter_bytes if self.recipe.parameters_on_host else 0

    def _fetched(self) -> tuple[int, int]:
        """Bytes of activations that one backward pass fetches, and fetches again: what several operators
        keep comes for each of them, and only for the first ahead of its use (OffloadedActivations)."""
        if not self.recipe.activations_on_host:
            return 0, 0
        first = self.sizes.kept_in_forward - self.sizes.kept_by_ctx
        again = 0
        for stage in self.sizes.stages.all:
            if not stage.checkpointed:
                in_ctx = {id(t.storage) for op in stage.tape.ops for t in op.kept_by_ctx}
                reads = (t.storage for op in stage.tape.ops for t in op.saved)
                all_reads = sum(t.size_bytes for t in reads if id(t) not in in_ctx)
                again += stage.count * (all_reads - stage.kept + stage.kept_by_ctx)
        return first, again

    def _step(self) -> PhaseTime:
        optimizer = self.sizes.optimizer
        works = [] if optimizer.in_backward else step_work(self.recipe, self.sizes.trained)
        if not optimizer.on_host:
            return self._phase("optimizer_step", works, 0)
        moved = sum(work.bytes_moved for work in works)
        leaves = 0 if self.recipe.parameters_on_host else 2 * self.sizes.gradient_bytes
        phase = self._phase("optimizer_step", [], leaves)  # gradients out, weights back
        return replace(phase, host_step_s=moved / self.hardware.calibration.host_memory_bandwidth)


def _added_gradients(stage: Stage) -> Work:
    """A tensor that several operators read gets a gradient from each: all but the first are added to it."""
    uses = Counter(id(t) for op in stage.tape.ops for t in op.inputs if t.grad)
    read = {id(t): t for op in stage.tape.ops for t in op.inputs}
    moved = 0 if stage.tape.compiled else sum(3 * read[t].size_bytes * (n - 1) for t, n in uses.items())
    return Work(0, moved, sum(uses.values()) - len(uses))
