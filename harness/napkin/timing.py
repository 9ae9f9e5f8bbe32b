"""The time of a step by phase: the FLOPs and bytes of its layers, over what the device can do. No torch.

A product of T rows with a matrix of n elements takes 2·T·n FLOPs, its backward as many for the input and as
many for a weight that trains (Kaplan et al., arXiv 2001.08361). Attention counts the whole square of scores.
What is kept for backward was written once and is read twice.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import harness.hardware as device
from harness.architecture import Matrix, matrices_of
from harness.hardware import Work
from harness.kernel_time import time_of, transfer
from harness.napkin.activations import DEQUANTIZED
from harness.napkin.memory import Sizes
from harness.napkin.ranks import ring, sent_bytes
from harness.napkin.terms import sum_of
from harness.napkin.weights import SIZES
from harness.step_profile import utilization

PASSES, OPERATORS, OPERATORS_OF_LORA, OPERATORS_OF_LOSS = 3, 40, 8, 12
"""PASSES is how often each byte that is kept is read or written. The others are the operators that forward
launches for a block besides its matrix products, for an adapter, and for the loss."""
COMPILED_PASSES = 1.2, 2.3
"""The passes over what a compiled block keeps, in forward and in backward, as Inductor counts them for the
kernels that it makes (profiles/cpu/compiled_bytes.json)."""

FP8_EAGER, FP8_COMPILED = (34, 8), (5, 0)
"""Bytes moved for each element that is cast to fp8, and kernels launched for each tensor. Eager code finds
the largest value, multiplies with the scale in fp32, clamps and rounds (torchao/float8/float8_utils.py);
compiled code reads the tensor twice and writes it once."""


@dataclass(frozen=True)
class PhaseTime:
    """The time of one phase of an optimizer step, all micro batches together."""

    works: list[Work]
    time: device.Time
    transfer_s: float  # over the host link, while the device computes
    waited_s: float  # for transfers and the host's own work
    recomputed_flops: int
    sent_s: float  # to other ranks
    exposed_s: float  # the part of sent_s that no computation hides

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.works)

    @property
    def bytes_moved(self) -> int:
        return sum(work.bytes_moved for work in self.works)

    @property
    def seconds(self) -> float:  # compute and transfers overlap, waiting does not
        return max(self.time.seconds, self.transfer_s) + self.waited_s + self.exposed_s

    def seconds_at(self, end: int) -> float:
        """The phase's seconds at one end of the range of the device's work: 0 is the low end, 1 the high."""
        device_s = self.time.range_s[end] if self.time.range_s is not None else self.time.device_s
        working_s = max(device_s, self.time.host_s, self.transfer_s)
        return working_s + self.waited_s + self.exposed_s


class Timing:
    """The times of one optimizer step and its phases."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.recipe, self.hardware = sizes, sizes.recipe, sizes.hardware
        self.acts, self.micro = sizes.activations, sizes.micro_batches

    @cached_property
    def phases(self) -> dict[str, PhaseTime]:
        """The time of data, forward, backward and optimizer_step."""
        sizes, recipe, step, micro = self.sizes, self.recipe, self.sizes.optimizer, self.micro
        update, on_host = Work(0, step.moved_bytes, step.launches), recipe.parameters_on_host
        # checkpoints cross on the compute stream; while what the loss keeps does, nothing is left to compute
        waits = sizes.kept_on_host if recipe.checkpoints_on_host else 0
        moved = micro * (sizes.kept_on_host - waits + (sizes.parameter_bytes if sizes.away else 0))
        waits = micro * (waits + sizes.kept_by_loss * recipe.activations_on_host)
        share = 1.0 if self.acts.recomputes else 1 - sizes.budget
        repeated = [work.share(share) for work in self._layers(1, 1, again=True)] if share else []
        backward = [*repeated, *self._layers(2 if recipe.trains_base else 1, 2)]
        backward += self._products(sizes.built.head, 1) if recipe.by_trl else []  # its tiles, made anew
        passes = (1 + recipe.computes_reference) * (1 + recipe.unpaired)
        forward = self._layers(1, 1) * passes
        added = 3 * sizes.gradient_bytes * (micro - 1)  # to gradients of earlier micro batches
        backward.append(Work(0, 0 if on_host else added, sum(w.count for w in sizes.trained) * (micro - 1)))
        backward += [update] if step.in_backward else []
        crossing = 2 * sizes.gradient_bytes * (recipe.steps_on_host and not sizes.away)  # and weights back
        products = [Work(*each, "matmul", step.products_in) for each in step.products]
        steps = [] if recipe.steps_on_host or step.in_backward else [update, *products]
        stepped = update.bytes_moved if recipe.steps_on_host else 0
        inputs, recomputed = [Work(0, sizes.input_bytes, 2 * micro)], sum(work.flops for work in repeated)
        waits_back = waits + micro * sizes.gradient_bytes * on_host
        return {
            "data": self._phase("data", inputs, sizes.input_bytes),
            "forward": self._phase("forward", forward, moved, waits),
            "backward": self._phase("backward", backward, moved, waits_back, added * on_host, recomputed),
            "optimizer_step": self._phase("optimizer_step", steps, crossing, 0, stepped),
        }

    def _phase(
        self, name: str, works: list[Work], moved: int, waits: int = 0, on_host: int = 0, recomputed: int = 0
    ) -> PhaseTime:
        """The time of `works`, while `moved` bytes cross the host link. The device also waits for `waits`
        bytes to cross it, and for work of the host on `on_host` bytes."""
        if self.acts.compiled:  # a compiled graph is launched by one call
            works = [replace(work, operators=0) for work in works]
        hardware, sizes, built = self.hardware, self.sizes, self.sizes.built
        time, link = time_of(works, hardware), transfer(hardware, moved)
        waited = transfer(hardware, waits) + on_host / hardware.calibration.host_memory_bandwidth
        ranks, sent = sent_bytes(built, sizes.units, sizes.bucket_bytes).get(name, (range(1), 0.0))
        byte_s = device.collective_s("all_gather", 10**9, ranks, hardware) / 1e9 / (ring(len(ranks)) or 1)
        share = 1.0 if self.recipe.tp > 1 else 1 / built.shape.layers  # the first unit, or the last bucket
        exposed = share * sent * byte_s + max(0.0, (1 - share) * sent * byte_s - time.seconds)
        return PhaseTime(works, time, link, waited, recomputed, sent * byte_s, exposed)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def range_s(self) -> tuple[float, float]:
        """The step's seconds if estimates of such kernels err by their 10th or 90th percentile, all alike."""
        low, high = (sum(phase.seconds_at(end) for phase in self.phases.values()) for end in (0, 1))
        return low, high

    @property
    def model_flops(self) -> int:
        """The FLOPs of forward and backward without recomputation, which MFU counts."""
        return self.hardware_flops - self.phases["backward"].recomputed_flops

    @property
    def hardware_flops(self) -> int:
        """The FLOPs of forward and backward with recomputation, which HFU counts."""
        return self.phases["forward"].flops + self.phases["backward"].flops

    @property
    def bound(self) -> device.Bound:
        """What most of the step waits for: matrix products, device memory, or the host and the links."""
        times = [phase.time for phase in self.phases.values()]
        busy, computing = sum(t.device_s for t in times), sum(t.computing_s for t in times)
        most = "compute" if computing > busy - computing else "memory"
        return "host" if self.seconds - busy > max(computing, busy - computing) else most

    @property
    def intensities(self) -> tuple[float, float]:
        """The step's FLOPs per byte, and those at which computing and reading take equally long."""
        works, dtype = [w for phase in self.phases.values() for w in phase.works], self.recipe.compute_dtype
        return device.arithmetic_intensity(works), device.machine_balance(self.hardware, dtype)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        return self.recipe.global_tokens_per_step / self.seconds

    def utilization(self, flops: int) -> float:
        return utilization(flops, self.seconds, self.hardware.peak_flops(self.recipe.compute_dtype)) or 0.0

    def _products(self, matrix: Matrix, times: int, *, backward: bool = False) -> list[Work]:
        """The work of `times` products with a matrix in every micro batch, with those of its adapter.
        Backward dequantizes a linear layer's weight again; the experts' it has kept since forward."""
        tp, dtype = self.recipe.tp, self.recipe.compute_dtype
        built, width = self.sizes.built, self.acts.compute
        rows, n = self.acts.dims.of("B·S·X" if matrix.stacked > 1 else "B·S"), matrix.elements // tp
        moved = (rows * (matrix.inputs + matrix.outputs // tp) + n) * width
        kept = backward and matrix.stacked > 1
        before = n * width if built.storage(matrix) and not kept else 0  # the weight in 16 bit
        in_fp8 = built.in_fp8(matrix)
        works = [Work(2 * rows * n // matrix.stacked, moved, 1, "matmul", "fp8" if in_fp8 else dtype, before)]
        if in_fp8:  # of three products the input, the weight and the output's gradient are factors of two
            size, launches = FP8_COMPILED if self.acts.compiled else FP8_EAGER
            factors = 2 * (rows * (matrix.inputs + matrix.outputs) + n) // 3
            works.append(Work(0, size * factors, 2 * launches))
        if matrix.name in built.adapted and built.lora:
            flops = 2 * rows * built.rank * (matrix.inputs + matrix.outputs) // tp
            wide = width if self.recipe.mixed else SIZES[built.adapter_dtype(matrix)]
            cast = wide * rows * (matrix.inputs + 3 * matrix.outputs)  # its input, products and sum
            works.append(Work(flops, cast, OPERATORS_OF_LORA, "matmul", dtype))
        return [work.times(times * self.micro) for work in works]

    def _is_last(self, matrix: Matrix) -> bool:
        """Whether nothing after this matrix product keeps its result, so that recomputation ends before it
        (torch.utils.checkpoint stops early)."""
        shape, built = self.sizes.built.shape, self.sizes.built
        followed = shape.norms > 2 or shape.residual_dropout or matrix.name in built.adapted
        return matrix.role == "down" and not followed

    def _layers(self, factor: int, passes: int, *, again: bool = False) -> list[Work]:
        """The work of all blocks, head and loss: `factor` products with each matrix, and everything else
        `passes` times. With `again`, only what checkpointing repeats: not the head, nor the last product."""
        keeps_products = again and self.acts.keeps_products
        sizes, acts, d, works = self.sizes, self.acts, self.acts.dims.of, list[Work]()
        for block in sizes.built.shape.blocks:
            count = block.count
            for matrix in matrices_of(sizes.built.shape, block):
                if again and self._is_last(matrix):
                    continue
                if not keeps_products or sizes.built.storage(matrix):
                    tiled = passes == 2 and acts.tiled(block) and matrix.role in ("up", "down")
                    works += self._products(matrix, count * (factor + tiled), backward=passes == 2)
            times = count * self.micro * passes
            over = COMPILED_PASSES[passes - 1] / passes if acts.compiled else PASSES
            read = sum_of(term for term in acts.kept_by(block) if term.source != DEQUANTIZED)  # by products
            works.append(Work(0, int(read * over), OPERATORS).times(times))
            if block.attends and not keeps_products:
                flops = 2 * d("B·N·S·S") * (d("D") + d("U"))  # a fused backward makes the scores once more
                flops += flops // 4 if passes == 2 and acts.kernel == "fused" else 0
                scores = 0 if acts.kernel == "fused" else d("B·N·S·S") * 4 * PASSES
                works.append(Work(flops, scores, 1, "attention", self.recipe.compute_dtype).times(times))
        made = d("B·S") * sizes.built.head.outputs
        # compiled, in one kernel: read, and read or written
        a_logit = 2 * acts.compute if acts.compiled else 4 * PASSES
        loss = Work(0, made * a_logit, OPERATORS_OF_LOSS).times(self.micro)
        return works if again else [*works, *self._products(sizes.built.head, factor), loss]
