"""Time of a step by phase: FLOPs and bytes of every operator over the device's ceilings. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from harness.hardware import Bound, Time, Work, time_of, transfer_s
from harness.napkin.memory.optimizer import step_work
from harness.napkin.memory.sizes import Sizes
from harness.napkin.tape.stages import Stage


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
    """For transfers in the other direction that the device waits for."""
    host_step_s: float = 0.0
    """An optimizer that steps in host memory."""

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
        """Compute and transfers overlap; a step on the host overlaps with neither."""
        return max(self.time.seconds + self.waited_s, self.transfer_s) + self.host_step_s


class Timing:
    """The phases of one optimizer step."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.recipe, self.hardware = sizes, sizes.recipe, sizes.hardware

    @cached_property
    def phases(self) -> dict[str, PhaseTime]:
        """data, forward, backward, optimizer_step."""
        return {
            "data": self._data(),
            "forward": self._phase("forward", self._forward(), self._over_link()),
            "backward": self._backward(),
            "optimizer_step": self._step(),
        }

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
        """What most of the step waits for: matrix products, device memory, or the host and its link."""
        waited: dict[Bound, float] = {"compute": 0.0, "memory": 0.0, "host": 0.0}
        for phase in self.phases.values():
            waited["host" if phase.seconds > phase.time.device_s else phase.time.bound] += phase.seconds
        return max(waited, key=lambda cause: waited[cause])

    @property
    def tokens_per_s(self) -> float:
        return self.recipe.tokens_per_step / self.seconds

    def utilization(self, flops: int) -> float:
        """`flops` over what the device could do in the time of the step."""
        return flops / (self.seconds * self.hardware.peak_flops(self.recipe.compute_dtype))

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

    def _forward(self) -> list[Work]:
        stages = self.sizes.stages
        works = [
            _times(op.forward, s.count * self.sizes.micro_batches) for s in stages.all for op in s.tape.ops
        ]
        fused = stages.head.fused
        return [*works, _times(fused.work, self.sizes.micro_batches)] if fused else works

    def _backward(self) -> PhaseTime:
        works: list[Work] = []
        recomputed = 0
        for stage in self.sizes.stages.all:
            times = stage.count * self.sizes.micro_batches
            again = [_times(op.forward, times) for op in stage.recomputed]
            recomputed += sum(work.flops for work in again)
            works += again
            works += [_times(op.backward, times) for op in stage.tape.ops]
            works.append(_times(_added_gradients(stage), times))
        earlier = self.sizes.micro_batches - 1
        tensors = sum(weight.count for weight in self.sizes.trained)
        works.append(Work(0, 3 * self.sizes.gradient_bytes * earlier, tensors * earlier))
        if self.sizes.optimizer.in_backward:
            works += step_work(self.recipe, self.sizes.trained)
        phase = self._phase("backward", works, self._over_link(), recomputed)
        leaves = self.sizes.gradient_bytes if self.recipe.parameters_on_host else 0
        return replace(phase, waited_s=transfer_s(self._micro_batches(leaves), self.hardware))

    def _over_link(self) -> int:
        """Bytes over the host link, in forward and in backward: activations out and back, parameters in."""
        return self._micro_batches(
            (self.sizes.kept_in_forward if self.recipe.activations_on_host else 0)
            + (self.sizes.parameter_bytes if self.recipe.parameters_on_host else 0)
        )

    def _micro_batches(self, size_bytes: int) -> int:
        return size_bytes * self.sizes.micro_batches

    def _step(self) -> PhaseTime:
        optimizer = self.sizes.optimizer
        works = [] if optimizer.in_backward else step_work(self.recipe, self.sizes.trained)
        if not optimizer.on_host:
            return self._phase("optimizer_step", works, 0)
        moved = sum(work.bytes_moved for work in works)
        leaves = 0 if self.recipe.parameters_on_host else 2 * self.sizes.gradient_bytes
        phase = self._phase("optimizer_step", [], leaves)  # gradients out, weights back
        return replace(phase, host_step_s=moved / self.hardware.calibration.host_memory_bandwidth)


def _times(work: Work, times: int) -> Work:
    return replace(
        work, flops=work.flops * times, bytes_moved=work.bytes_moved * times, operators=work.operators * times
    )


def _added_gradients(stage: Stage) -> Work:
    """A tensor that several operators read gets a gradient from each: all but the first are added to it."""
    uses = Counter(id(t) for op in stage.tape.ops for t in op.inputs if t.grad)
    read = {id(t): t for op in stage.tape.ops for t in op.inputs}
    moved = 0 if stage.tape.compiled else sum(3 * read[t].size_bytes * (n - 1) for t, n in uses.items())
    return Work(0, moved, sum(uses.values()) - len(uses))
