"""Time of a step by phase: FLOPs and bytes of every operator over the device's ceilings. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.hardware import Bound, Time, Work, time_of, transfer_s
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.optimizer import step_work
from harness.napkin.memory.sizes import Sizes
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import Op


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
        return replace(work, operators=0) if self.recipe.compile else work

    def _data(self) -> PhaseTime:
        inputs = self.sizes.input_bytes
        return self._phase("data", [Work(0, inputs, 2 * self.recipe.gradient_accumulation_steps)], inputs)

    def _forward(self) -> list[Work]:
        return [work for stage in self.sizes.stages.all for work in self._repeated(stage, _forward(stage))]

    def _repeated(self, stage: Stage, works: Sequence[Work]) -> list[Work]:
        times = stage.count * self.recipe.gradient_accumulation_steps
        return [_times(work, times) for work in works] + self._fused_loss(stage)

    def _fused_loss(self, stage: Stage) -> list[Work]:
        """A fused loss computes logits and both their gradients in forward, chunk by chunk."""
        stages, recipe = self.sizes.stages, self.recipe
        if stage is not stages.loss or recipe.loss != "fused_linear":
            return []
        shape, tokens = self.sizes.built.shape, recipe.micro_batch_size * recipe.seq_len
        products = 3 if self.sizes.built.trains_base else 2
        dtype = stage.tape.autocast or stages.hidden.dtype
        one = 2 * tokens * shape.vocab * shape.hidden
        moved = 3 * tokens * shape.vocab * SIZES[dtype]
        # every chunk reads the head twice, and adds to all of the head's gradient
        head = 2 * SIZES[dtype] + (2 * SIZES[self.sizes.built.loose_dtype] if products == 3 else 0)
        moved += stages.fused_chunks * head * shape.vocab * shape.hidden
        work = Work(products * one, moved, 8, "matmul", dtype)
        return [_times(work, recipe.gradient_accumulation_steps)]

    def _backward(self) -> PhaseTime:
        works: list[Work] = []
        recomputed = 0
        for stage in self.sizes.stages.all:
            times = stage.count * self.recipe.gradient_accumulation_steps
            if self.recipe.gradient_checkpointing and stage in self.sizes.stages.blocks:
                again = _forward(stage, recomputing=True)
                recomputed += sum(work.flops for work in again) * times
                works += [_times(work, times) for work in again]
            works += [_times(op.backward, times) for op in stage.tape.ops]
            works.append(_times(_added_gradients(stage), times))
        earlier = self.recipe.gradient_accumulation_steps - 1
        tensors = sum(weight.count for weight in self.sizes.trained)
        works.append(Work(0, 3 * self.sizes.gradient_bytes * earlier, tensors * earlier))
        if self.recipe.optimizer_in_backward:
            works += step_work(self.recipe, self.sizes.trained)
        phase = self._phase("backward", works, self._over_link(), recomputed)
        leaves = self.sizes.gradient_bytes if "parameters" in self.recipe.offload else 0
        return replace(phase, waited_s=transfer_s(self._micro_batches(leaves), self.hardware))

    def _over_link(self) -> int:
        """Bytes over the host link, in forward and in backward: activations out and back, parameters in."""
        return self._micro_batches(
            (self.sizes.kept_in_forward if self.sizes.offloads_activations else 0)
            + (self.sizes.parameter_bytes if "parameters" in self.recipe.offload else 0)
        )

    def _micro_batches(self, size_bytes: int) -> int:
        return size_bytes * self.recipe.gradient_accumulation_steps

    def _step(self) -> PhaseTime:
        in_backward = self.recipe.optimizer_in_backward
        works = [] if in_backward else step_work(self.recipe, self.sizes.trained)
        if not self.sizes.optimizer.on_host:
            return self._phase("optimizer_step", works, 0)
        moved = sum(work.bytes_moved for work in works)
        leaves = 2 * self.sizes.gradient_bytes if "optimizer" in self.recipe.offload else 0
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


def _forward(stage: Stage, *, recomputing: bool = False) -> list[Work]:
    """Forward's work. Recomputation stops when the last tensor that forward kept is there again: a product
    keeps its factors before it runs, so a block's last one does not (torch/utils/checkpoint.py)."""
    ops: Sequence[Op] = stage.tape.ops
    if recomputing:
        last = max((i for i, op in enumerate(ops) if op.saved or op.keeps_weight), default=-1)
        is_product = last >= 0 and ops[last].forward.kind == "matmul"
        ops = ops[: last if is_product else last + 1]
    return [op.forward for op in ops]
