"""Time of a step by phase: FLOPs and bytes of its layers over the device's ceilings. No torch.

This file alone knows the roofline. A product of T rows with a matrix of n elements is 2·T·n FLOPs, its
backward as many for the input and as many for a weight that trains (Kaplan et al., arXiv 2001.08361, section
2.1); attention counts the whole square of scores. A tensor that backward keeps was written once and read twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from harness.architecture import Matrix, matrices_of
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
from harness.napkin.memory import Sizes
from harness.napkin.ranks import ring, sent_bytes
from harness.step_profile import utilization

PASSES = 3
"""Over memory, for each byte that backward keeps."""
OPERATORS, OPERATORS_OF_LORA, OPERATORS_OF_LOSS = 40, 8, 12
"""Launched in forward for a block's norms, rotations, sums and nonlinearity; for an adapter; for the loss."""


@dataclass(frozen=True)
class PhaseTime:
    """One phase of the whole optimizer step, all its micro batches together."""

    works: list[Work]
    time: Time
    transfer_s: float = 0.0
    """Over the host link, while the device computes."""
    waited_s: float = 0.0
    """For transfers, and for the host's own work, that the device waits for."""
    recomputed_flops: int = 0
    sent_s: float = 0.0
    """Sending to other ranks: under what computes, but for the sums of tensor parallelism."""
    exposed_s: float = 0.0
    """Of that, what computing does not hide."""

    @property
    def flops(self) -> int:
        """Recomputation included."""
        return sum(work.flops for work in self.works)

    @property
    def bytes_moved(self) -> int:
        """Read from and written to device memory."""
        return sum(work.bytes_moved for work in self.works)

    @property
    def seconds(self) -> float:
        """Compute and transfers overlap, waiting does not."""
        return max(self.time.seconds, self.transfer_s) + self.waited_s + self.exposed_s


class Timing:
    """The phases of one optimizer step."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.recipe, self.hardware = sizes, sizes.recipe, sizes.hardware
        self.acts, self.micro = sizes.activations, sizes.micro_batches
        trained = sizes.optimizer
        self.update = Work(0, trained.moved_bytes, trained.launches)
        self.parameters_in = sizes.parameter_bytes if sizes.away else 0
        """Bytes that come from the host for one forward or backward pass."""

    @cached_property
    def phases(self) -> dict[str, PhaseTime]:
        """data, forward, backward, optimizer_step."""
        sizes, host = self.sizes, self.hardware.calibration.host_memory_bandwidth
        leaves = (sizes.kept_by_blocks + sizes.kept_by_loss) * self.recipe.activations_on_host
        waits = transfer_s(self.micro * sizes.kept_by_loss * bool(leaves), self.hardware)
        moved = self.micro * (leaves + self.parameters_in)
        phases = {
            "data": self._phase([Work(0, sizes.input_bytes, 2 * self.micro)], sizes.input_bytes),
            "forward": self._phase(self._layers(1, 1), moved, waits),
            "backward": self._backward(moved, waits),
        }
        if self.recipe.steps_on_host:  # gradients leave, and weights come back
            there = 0 if sizes.away else 2 * sizes.gradient_bytes
            phases["optimizer_step"] = self._phase([], there, self.update.bytes_moved / host)
        else:
            phases["optimizer_step"] = self._phase([] if sizes.optimizer.in_backward else [self.update])
        for name, (ranks, size) in sent_bytes(sizes.built, sizes.units, sizes.bucket_bytes).items():
            whole = collective_s("all_gather", 10**9, ranks, self.hardware)
            sent = size * whole / (10**9 * (ring(len(ranks)) or 1.0))  # a ring's time for a byte
            exposed = max(0.0, sent - phases[name].time.seconds * (self.recipe.tp == 1))
            phases[name] = replace(phases[name], sent_s=sent, exposed_s=exposed)
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
    def bound(self) -> Bound:
        """What most of the step waits for: matrix products, device memory, or the host and the links."""
        times = [phase.time for phase in self.phases.values()]
        device, computing = sum(t.device_s for t in times), sum(t.computing_s for t in times)
        waits: dict[Bound, float] = {"compute": computing, "memory": device - computing}
        waits["host"] = self.seconds - device
        return max(waits, key=lambda cause: waits[cause])

    @property
    def intensities(self) -> tuple[float, float]:
        """FLOPs per byte of the step, and those at which the device computes and reads equally long."""
        works = [work for phase in self.phases.values() for work in phase.works]
        return arithmetic_intensity(works), machine_balance(self.hardware, self.recipe.compute_dtype)

    @property
    def tokens_per_s(self) -> float:
        return self.recipe.tokens_per_step / self.seconds

    def utilization(self, flops: int) -> float:
        """`flops` over what the device could do in the time of the step."""
        return utilization(flops, self.seconds, self.hardware.peak_flops(self.recipe.compute_dtype)) or 0.0

    def _phase(self, works: list[Work], moved: int = 0, waits: float = 0.0, recomputed: int = 0) -> PhaseTime:
        """`moved` bytes cross the host link."""
        if self.acts.compiled:  # a compiled graph is launched by one call
            works = [replace(work, operators=0) for work in works]
        seconds = transfer_s(moved, self.hardware)
        return PhaseTime(works, time_of(works, self.hardware), seconds, waits, recomputed)

    def _products(self, matrix: Matrix, times: int) -> list[Work]:
        """So many products with a matrix, in all micro batches."""
        tp, built, width, dtype = (
            self.recipe.tp,
            self.sizes.built,
            self.acts.compute,
            self.recipe.compute_dtype,
        )
        rows, n = self.acts.dims.of("B·S·X" if matrix.stacked > 1 else "B·S"), matrix.elements // tp
        moved = (rows * (matrix.inputs + matrix.outputs // tp) + n) * width
        before = n * width if built.storage(matrix) else 0  # the weight in 16 bit
        works = [Work(2 * rows * n // matrix.stacked, moved, 1, "matmul", dtype, before)]
        if matrix.name in built.adapted and built.lora:
            flops = 2 * rows * built.rank * (matrix.inputs + matrix.outputs) // tp
            cast = (
                4 * rows * (matrix.inputs + 3 * matrix.outputs)
            )  # to fp32, the products of A and B, the sum
            works.append(Work(flops, cast, OPERATORS_OF_LORA, "matmul", dtype))
        return [work.times(times * self.micro) for work in works]

    def _layers(self, factor: int, passes: int, *, head: bool = True) -> list[Work]:
        """`factor` products with each matrix, `passes` over all else, and the head with the loss."""
        sizes, acts, d, works = self.sizes, self.acts, self.acts.dims.of, list[Work]()
        for block, (count, kept, again) in zip(sizes.built.shape.blocks, sizes.kept, strict=True):
            for matrix in matrices_of(sizes.built.shape, block):
                works += self._products(matrix, count * factor)
            times = count * self.micro * passes
            works.append(Work(0, (again or kept) * PASSES, OPERATORS).times(times))
            if "attention" in block.mixer or block.mixer == "sliding":
                flops = 2 * d("B·N·S·S") * (d("D") + d("U"))
                scores = 0 if acts.kernel == "fused" else d("B·N·S·S") * 4 * PASSES
                works.append(Work(flops, scores, 1, "attention", self.recipe.compute_dtype).times(times))
        loss = Work(0, d("B·S·V") * 4 * PASSES, OPERATORS_OF_LOSS).times(self.micro)
        return [*works, *self._products(sizes.built.head, factor), loss] if head else works

    def _backward(self, moved: int, waits: float) -> PhaseTime:
        sizes, earlier, on_host = self.sizes, self.micro - 1, self.recipe.parameters_on_host
        again = self._layers(1, 1, head=False) if self.acts.recomputes else []
        works = [*again, *self._layers(2 if self.recipe.trains_base else 1, 2)]
        added = 3 * sizes.gradient_bytes * earlier  # to those of earlier micro batches
        works.append(Work(0, 0 if on_host else added, sum(w.count for w in sizes.trained) * earlier))
        works += [self.update] if sizes.optimizer.in_backward else []
        if on_host:  # gradients leave, and the host adds them
            waits += transfer_s(self.micro * sizes.gradient_bytes, self.hardware)
            waits += added / self.hardware.calibration.host_memory_bandwidth
        return self._phase(works, moved, waits, sum(work.flops for work in again))
