"""Time of a step by phase: FLOPs and bytes of its layers over the device's ceilings. No torch.

This file alone knows the roofline. A product of T rows with a matrix of n elements is 2·T·n FLOPs, its backward
as many for the input and as many for a weight that trains (Kaplan et al., arXiv 2001.08361, section 2.1);
attention counts the whole square of scores. A tensor that backward keeps was written once and read twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from harness.hardware import (
    Bound,
    Time,
    Work,
    arithmetic_intensity,
    collective_s,
    machine_balance,
    time_of,
    transfer_s,
)
from harness.napkin import optimizer
from harness.napkin.layers import Matrix, matrices_of
from harness.napkin.memory import Sizes
from harness.napkin.ranks import Traffic, ring, traffic
from harness.step_profile import utilization

PASSES = 3
"""Over memory, for each byte that backward keeps: written, and read by two."""
OPERATORS = 40
"""Launched for a block's norms, rotations, sums and nonlinearity in forward; its products come on top."""
OPERATORS_OF_LORA = 8


@dataclass(frozen=True)
class PhaseTime:
    """One phase of the whole optimizer step, all its micro batches together."""

    name: str
    works: list[Work]
    time: Time
    transfer_s: float = 0.0
    """Over the host link, while the device computes."""
    recomputed_flops: int = 0
    waited_s: float = 0.0
    """For transfers that the device waits for."""
    host_step_s: float = 0.0
    """The host's own work on what is in its memory."""
    sent_s: float = 0.0
    """Sending to other ranks, under what computes."""
    shown_s: float = 0.0
    """Of that, what nothing computes under."""
    sending_share: float = 1.0
    """Of the phase's computing, what can hide it."""

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
        inputs = self.sizes.input_bytes
        phases = {
            "data": self._phase("data", [Work(0, inputs, 2 * self.sizes.micro_batches)], inputs),
            "forward": self._forward(),
            "backward": self._backward(),
            "optimizer_step": self._step(),
        }
        for name, sends in traffic(self.sizes.built).items():
            phases[name] = replace(
                phases[name],
                sent_s=sum(sent.sent / self.link_of(sent) for sent in sends),
                shown_s=sum(sent.exposed / self.link_of(sent) for sent in sends),
                sending_share=min((sent.times for sent in sends), default=1) / self.sizes.micro_batches,
            )
        return phases

    def link_of(self, sent: Traffic) -> float:
        """Bytes per second from a rank to the next."""
        whole, ranks = 10**9, sent.ranks
        seconds = collective_s("all_gather", whole, ranks, self.hardware)
        return ring(len(ranks)) * whole / seconds if seconds else self.hardware.datasheet.gpu_link.value

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
    def balance(self) -> tuple[float, float]:
        """FLOPs per byte of the step, and those at which the device computes and reads equally long."""
        works = [work for phase in self.phases.values() for work in phase.works]
        return arithmetic_intensity(works), machine_balance(self.hardware, self.recipe.compute_dtype)

    @property
    def tokens_per_s(self) -> float:
        return self.recipe.tokens_per_step / self.seconds

    def utilization(self, flops: int) -> float:
        """`flops` over what the device could do in the time of the step."""
        return utilization(flops, self.seconds, self.hardware.peak_flops(self.recipe.compute_dtype)) or 0.0

    def _phase(self, name: str, works: list[Work], transfer: int = 0, recomputed: int = 0) -> PhaseTime:
        if self.recipe.compile:  # a compiled graph is launched by one call
            works = [replace(work, operators=0) for work in works]
        seconds = transfer_s(transfer, self.hardware)
        return PhaseTime(name, works, time_of(works, self.hardware), seconds, recomputed)

    def _products(self, matrix: Matrix, count: int, factor: int) -> list[Work]:
        """`factor` products with a matrix, in `count` blocks, of all micro batches."""
        sizes, recipe, built = self.sizes, self.recipe, self.sizes.built
        numbers, width = sizes.activations.numbers, sizes.activations.compute
        rows = numbers["B"] * numbers["S"]
        routed = matrix.stacked > 1
        if routed:
            rows *= numbers["X"]
        divided = matrix.elements // recipe.tp
        times = factor * count * sizes.micro_batches
        work = Work(
            2 * rows * divided // matrix.stacked,
            rows * (matrix.inputs + matrix.outputs // recipe.tp) * width + divided * width,
            1,
            "matmul",
            recipe.compute_dtype,
            before_bytes=divided * width if built.storage(matrix) else 0,
        )
        works = [work.times(times)]
        if matrix.name in built.adapted and recipe.adapter == "lora":
            flops = 2 * rows * recipe.lora_rank * (matrix.inputs + matrix.outputs) // recipe.tp
            moved = 4 * rows * (matrix.inputs + 3 * matrix.outputs)  # to fp32, A's and B's products, the sum
            works.append(Work(flops, moved, OPERATORS_OF_LORA, "matmul", recipe.compute_dtype).times(times))
        return works

    def _blocks(self, factor: int, *, attention: float) -> list[Work]:
        """The blocks: `factor` products with each matrix, and `attention` times the forward's FLOPs."""
        sizes, acts = self.sizes, self.sizes.activations
        works: list[Work] = []
        for block, (count, kept, again) in zip(sizes.built.whole.blocks, sizes.blocks_kept, strict=True):
            for matrix in matrices_of(sizes.built.whole, block):
                works += self._products(matrix, count, factor)
            times = count * sizes.micro_batches
            moved = (again or kept) * PASSES
            works.append(Work(0, int(moved * attention), int(OPERATORS * attention)).times(times))
            if "attention" in block.mixer or block.mixer == "sliding":
                flops = 2 * (acts.dims.elements("B·N·S·S·D") + acts.dims.elements("B·N·S·S·U"))
                scores = 0 if acts.kernel == "fused" else acts.dims.elements("B·N·S·S") * 4 * PASSES
                work = Work(int(flops * attention), int(scores * attention), 1, "attention", self.recipe.compute_dtype)
                works.append(work.times(times))
        return works

    def _forward(self) -> PhaseTime:
        sizes, recipe = self.sizes, self.recipe
        loss = sizes.activations.dims.elements("B·S·V") * 4 * PASSES
        works = [
            *self._blocks(1, attention=1),
            *self._products(sizes.built.head, 1, 1),
            Work(0, loss, 12).times(sizes.micro_batches),
        ]
        leaves = sizes.kept_by_blocks + sizes.kept_by_loss if recipe.activations_on_host else 0
        phase = self._phase("forward", works, sizes.micro_batches * (leaves + self._parameters_in))
        at_the_end = sizes.kept_by_loss if leaves else 0
        return replace(phase, waited_s=transfer_s(sizes.micro_batches * at_the_end, self.hardware))

    def _backward(self) -> PhaseTime:
        sizes, recipe = self.sizes, self.recipe
        factor = 2 if recipe.trains_base else 1
        again = self._blocks(1, attention=1) if recipe.gradient_checkpointing else []
        loss = sizes.activations.dims.elements("B·S·V") * 4 * PASSES
        works = [
            *again,
            *self._blocks(factor, attention=2),
            *self._products(sizes.built.head, 1, factor),
            Work(0, loss, 8).times(sizes.micro_batches),
        ]
        earlier = sizes.micro_batches - 1
        added = 3 * sizes.gradient_bytes * earlier
        works.append(Work(0, 0 if recipe.parameters_on_host else added, sum(w.count for w in sizes.trained) * earlier))
        if recipe.optimizer_in_backward:
            works.append(self._update)
        fetched = sizes.kept_by_blocks + sizes.kept_by_loss if recipe.activations_on_host else 0
        transfer = sizes.micro_batches * (fetched + self._parameters_in)
        phase = self._phase("backward", works, transfer, sum(work.flops for work in again))
        leaves = sizes.gradient_bytes if recipe.parameters_on_host else 0
        waits = transfer_s(sizes.micro_batches * (leaves + (sizes.kept_by_loss if fetched else 0)), self.hardware)
        on_host = added / self.hardware.calibration.host_memory_bandwidth if recipe.parameters_on_host else 0.0
        return replace(phase, waited_s=waits, host_step_s=on_host)

    @property
    def _parameters_in(self) -> int:
        """Bytes of parameters that come from the host for one forward or backward pass."""
        return self.sizes.parameter_bytes if self.sizes.parameters_away else 0

    @property
    def _update(self) -> Work:
        trained = self.sizes.trained
        return Work(0, optimizer.moved_bytes(self.recipe, trained), optimizer.launches(self.recipe, trained))

    def _step(self) -> PhaseTime:
        recipe = self.recipe
        if not recipe.steps_on_host:
            return self._phase("optimizer_step", [] if recipe.optimizer_in_backward else [self._update])
        leaves = 0 if self.sizes.parameters_away else 2 * self.sizes.gradient_bytes  # and weights come back
        phase = self._phase("optimizer_step", [], leaves)
        moved = optimizer.moved_bytes(recipe, self.sizes.trained)
        return replace(phase, host_step_s=moved / self.hardware.calibration.host_memory_bandwidth)
