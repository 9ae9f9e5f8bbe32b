"""Time of a step by phase: FLOPs and bytes of its layers over the device's ceilings. No torch.

This file alone knows the roofline. A product of T rows with a matrix of n elements is 2·T·n FLOPs, its backward
as many for the input and as many for a weight that trains (Kaplan et al., arXiv 2001.08361, section 2.1);
attention counts the whole square of scores. A tensor that backward keeps was written once and read twice.
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
from harness.napkin import optimizer
from harness.napkin.memory import Sizes
from harness.napkin.ranks import ring, traffic
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
    """Sending to other ranks."""
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
        self.sizes, self.recipe, self.hardware, self.micro = sizes, sizes.recipe, sizes.hardware, sizes.micro_batches

    @cached_property
    def phases(self) -> dict[str, PhaseTime]:
        """data, forward, backward, optimizer_step."""
        inputs = self.sizes.input_bytes
        phases = {
            "data": self._phase([Work(0, inputs, 2 * self.micro)], inputs),
            "forward": self._forward(),
            "backward": self._backward(),
            "optimizer_step": self._step(),
        }
        for name, sends in traffic(self.sizes.built, self.sizes.bucket_bytes).items():
            sent, shown = 0.0, 0.0
            for each in sends:
                whole = collective_s("all_gather", 10**9, each.ranks, self.hardware) or 1.0
                second = whole / (10**9 * (ring(len(each.ranks)) or 1.0))  # a byte's, from a rank to the next
                sent, shown = sent + each.sent * second, shown + each.exposed * second
            hidden = max(0.0, sent - shown - phases[name].time.seconds)
            phases[name] = replace(phases[name], sent_s=sent, exposed_s=shown + hidden)
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
        waited: dict[Bound, float] = {
            "compute": computing,
            "memory": device - computing,
            "host": self.seconds - device,
        }
        return max(waited, key=lambda cause: waited[cause])

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
        if self.sizes.activations.compiled:  # a compiled graph is launched by one call
            works = [replace(work, operators=0) for work in works]
        seconds = transfer_s(moved, self.hardware)
        return PhaseTime(works, time_of(works, self.hardware), seconds, waits, recomputed)

    def _products(self, matrix: Matrix, count: int, factor: int) -> list[Work]:
        """`factor` products with a matrix, in `count` blocks, of all micro batches."""
        recipe, built, acts = self.recipe, self.sizes.built, self.sizes.activations
        rows = acts.dims.of("B·S·X" if matrix.stacked > 1 else "B·S")
        width, n, dtype = acts.compute, matrix.elements // recipe.tp, recipe.compute_dtype
        moved = (rows * (matrix.inputs + matrix.outputs // recipe.tp) + n) * width
        before = n * width if built.storage(matrix) else 0
        works = [Work(2 * rows * n // matrix.stacked, moved, 1, "matmul", dtype, before)]
        if matrix.name in built.adapted and built.lora:
            flops = 2 * rows * built.rank * (matrix.inputs + matrix.outputs) // recipe.tp
            cast = 4 * rows * (matrix.inputs + 3 * matrix.outputs)  # to fp32, the products of A and B, the sum
            works.append(Work(flops, cast, OPERATORS_OF_LORA, "matmul", dtype))
        return [work.times(factor * count * self.micro) for work in works]

    def _layers(self, factor: int, passes: int) -> list[Work]:
        """`factor` products with each matrix, `passes` over everything else, and the head with the loss."""
        sizes, acts = self.sizes, self.sizes.activations
        d, works = acts.dims.of, self._products(sizes.built.head, 1, factor)
        for block, (count, kept, again) in zip(sizes.built.shape.blocks, sizes.kept, strict=True):
            for matrix in matrices_of(sizes.built.shape, block):
                works += self._products(matrix, count, factor)
            times = count * self.micro * passes
            works.append(Work(0, (again or kept) * PASSES, OPERATORS).times(times))
            if "attention" in block.mixer or block.mixer == "sliding":
                flops = 2 * d("B·N·S·S") * (d("D") + d("U"))
                scores = 0 if acts.kernel == "fused" else d("B·N·S·S") * 4 * PASSES
                works.append(Work(flops, scores, 1, "attention", self.recipe.compute_dtype).times(times))
        return [*works, Work(0, d("B·S·V") * 4 * PASSES, OPERATORS_OF_LOSS).times(self.micro)]

    def _forward(self) -> PhaseTime:
        works, host = self._layers(1, 1), self.recipe.activations_on_host
        leaves = (self.sizes.kept_by_blocks + self.sizes.kept_by_loss) * host
        waits = transfer_s(self.micro * self.sizes.kept_by_loss * host, self.hardware)
        return self._phase(works, self.micro * (leaves + self._parameters_in), waits)

    def _backward(self) -> PhaseTime:
        sizes, recipe, earlier = self.sizes, self.recipe, self.micro - 1
        works, recomputed = self._layers(2 if recipe.trains_base else 1, 2), 0
        if sizes.activations.recomputes:
            head = self._products(sizes.built.head, 1, 1)
            again = self._layers(1, 1)[len(head) : -1]
            works, recomputed = works + again, sum(work.flops for work in again)
        added = 3 * sizes.gradient_bytes * earlier
        on_host = recipe.parameters_on_host
        works.append(Work(0, 0 if on_host else added, sum(w.count for w in sizes.trained) * earlier))
        works += [self._update] if recipe.optimizer_in_backward else []
        fetched = (sizes.kept_by_blocks + sizes.kept_by_loss) * recipe.activations_on_host
        leaves = sizes.gradient_bytes * on_host + sizes.kept_by_loss * recipe.activations_on_host
        waits = transfer_s(self.micro * leaves, self.hardware)
        waits += added * on_host / self.hardware.calibration.host_memory_bandwidth
        return self._phase(works, self.micro * (fetched + self._parameters_in), waits, recomputed)

    @property
    def _parameters_in(self) -> int:
        """Bytes of parameters that come from the host for one forward or backward pass."""
        return self.sizes.parameter_bytes if self.sizes.away else 0

    @property
    def _update(self) -> Work:
        trained = self.sizes.trained
        return Work(0, optimizer.moved_bytes(self.recipe, trained), optimizer.launches(self.recipe, trained))

    def _step(self) -> PhaseTime:
        if not self.recipe.steps_on_host:
            return self._phase([] if self.recipe.optimizer_in_backward else [self._update])
        leaves = 0 if self.sizes.away else 2 * self.sizes.gradient_bytes  # and the weights come back
        on_host = self._update.bytes_moved / self.hardware.calibration.host_memory_bandwidth
        return self._phase([], leaves, on_host)
