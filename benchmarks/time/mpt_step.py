"""The training step of an MPT model under PyTorch's FSDP, kernel by kernel, as harness/kernel_time times it.

What the published runs trained (the file's `about`): blocks of layer norm, one product for query, key and
value, attention, its projection, layer norm, an MLP of 4 x hidden with GELU, no biases; learned positions;
the embedding's weights are the head's; fused AdamW; FSDP1 with a unit for each block and one for the rest,
weights gathered and gradients summed in 16 bit, one unit gathered ahead. It is what harness/simulate would
see operator by operator, written down by shape, for a run of 48 blocks on 512 GPUs takes it half a minute and
this a hundredth of a second. tests/benchmarks/test_time.py holds it against harness/simulate.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from harness.hardware.hardware import Hardware
from harness.kernel_time import KernelKind, attention, collective, memory, product, range_of

DTYPE, WIDTH, FULL_WIDTH = "bf16", 2, 4
"""Of all kernels; bytes of a number in 16 bit, and of the optimizer's."""
ADAMW_BYTES = 7 * FULL_WIDTH
"""Weight, gradient and two moments read, all but the gradient written."""
GPUS_PER_NODE = 8
NORM_PASSES, NORM_BACKWARD_PASSES = 2, 3
"""Tensors of tokens x hidden that a layer norm reads and writes: two forward; backward the gradient, the
input and the result."""


class Shape(NamedTuple):
    """A model."""

    hidden: int
    heads: int
    layers: int
    vocabulary: int = 50368

    @property
    def block_parameters(self) -> int:
        return 12 * self.hidden**2 + 2 * self.hidden

    @property
    def other_parameters(self) -> int:
        """Of the embedding, which is the head too, and of what is small."""
        return self.vocabulary * self.hidden


@dataclass(frozen=True)
class Run:
    """One published run."""

    shape: Shape
    seq_len: int
    gpus: int
    rows: int
    """A GPU and micro batch."""
    micro_batches: int
    """A step."""
    checkpointing: bool
    gathers_again: bool = True
    """FULL_SHARD. Otherwise (SHARD_GRAD_OP) weights stay from forward to backward."""
    network: float = 50e9
    """Bytes/s that each GPU sends to other machines."""
    attention: str = "flash1"
    """FlashAttention, of which the Triton attention of those days was a port."""
    early_stop: bool = True
    """Whether recomputing a block ends with what backward needs last, as PyTorch's does since 2.1: its last
    product is not run again."""
    products_speedup: float = 1.0
    """Of products in fp8: how many times the rate of 16 bit."""


@dataclass
class Kernels:
    """Seconds of a piece of the step, by what their estimates err alike in."""

    seconds: dict[KernelKind, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, kind: KernelKind, seconds: float) -> None:
        self.seconds[kind] += seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Estimate(NamedTuple):
    """Of one step."""

    seconds: float
    low_s: float
    high_s: float
    by_kind: dict[str, float]
    waits_s: float
    """For other ranks."""


class Step:
    """The step of a run on a device."""

    def __init__(self, run: Run, hardware: Hardware) -> None:
        self.run, self.hardware = run, hardware
        self.rows = max(1, run.rows)
        self.tokens = self.rows * run.seq_len

    def _product(self, m: int, n: int, k: int) -> float:
        return product(self.hardware, DTYPE, m, n, k) / self.run.products_speedup

    def _moves(self, kind: str, passes: float, width: int) -> float:
        return memory(self.hardware, kind, passes * self.tokens * width * WIDTH)

    def _attention(self, direction: str) -> float:
        shape, length = self.run.shape, self.run.seq_len
        size = shape.hidden // shape.heads
        return attention(
            self.hardware,
            self.run.attention,
            direction,  # type: ignore[arg-type]
            self.rows,
            shape.heads,
            length,
            length,
            size,
            causal=True,
            bytes_moved=(4 if direction == "forward" else 9) * self.tokens * shape.hidden * WIDTH,
        )

    @cached_property
    def block_forward(self) -> Kernels:
        d, kernels = self.run.shape.hidden, Kernels()
        for n, k in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)):
            kernels.add("product", self._product(self.tokens, n, k))
        kernels.add("attention", self._attention("forward"))
        kernels.add("memory", 2 * self._moves("norm", NORM_PASSES, d))
        kernels.add("memory", 2 * self._moves("elementwise", 3, d))  # residuals
        kernels.add("memory", self._moves("elementwise", 2, 4 * d))  # GELU
        return kernels

    @cached_property
    def block_again(self) -> Kernels:
        """The forward pass of a block, recomputed in backward."""
        d, kernels = self.run.shape.hidden, Kernels()
        kernels.seconds.update(self.block_forward.seconds)
        if self.run.early_stop:
            kernels.add("product", -self._product(self.tokens, d, 4 * d))
        return kernels

    @cached_property
    def block_backward(self) -> Kernels:
        d, kernels = self.run.shape.hidden, Kernels()
        for n, k in ((3 * d, d), (d, d), (4 * d, d), (d, 4 * d)):
            kernels.add("product", self._product(self.tokens, k, n))  # of the input
            kernels.add("product", self._product(n, k, self.tokens))  # of the weight
        kernels.add("attention", self._attention("backward"))
        kernels.add("memory", 2 * self._moves("norm", NORM_BACKWARD_PASSES, d))
        kernels.add("memory", 2 * self._moves("elementwise", 3, d))  # gradients of residuals are added
        kernels.add("memory", self._moves("elementwise", 3, 4 * d))  # GELU
        return kernels

    @cached_property
    def head_forward(self) -> Kernels:
        shape, kernels = self.run.shape, Kernels()
        kernels.add("memory", 2 * self._moves("elementwise", 3, shape.hidden))  # embedding and positions
        kernels.add("memory", self._moves("norm", NORM_PASSES, shape.hidden))
        kernels.add("product", product(self.hardware, DTYPE, self.tokens, shape.vocabulary, shape.hidden))
        # autocast: logits in fp32, of which the loss is taken
        kernels.add("memory", self._moves("copy", 1 + 2, shape.vocabulary))
        kernels.add("memory", self._moves("cross_entropy", 2 + 2, shape.vocabulary))
        return kernels

    @cached_property
    def head_backward(self) -> Kernels:
        shape, kernels = self.run.shape, Kernels()
        kernels.add("memory", self._moves("elementwise", 2, shape.vocabulary))  # zeros, into which -1 goes
        kernels.add("memory", self._moves("cross_entropy", 2 + 2 + 2, shape.vocabulary))
        kernels.add("memory", self._moves("copy", 2 + 1, shape.vocabulary))
        for m, n, k in (
            (self.tokens, shape.hidden, shape.vocabulary),
            (shape.vocabulary, shape.hidden, self.tokens),
        ):
            kernels.add("product", product(self.hardware, DTYPE, m, n, k))
        kernels.add("memory", self._moves("norm", NORM_BACKWARD_PASSES, shape.hidden))
        kernels.add("memory", self._moves("elementwise", 3, shape.hidden))
        return kernels

    @cached_property
    def optimizer(self) -> Kernels:
        """Of this rank's share: gradients are measured, clipped and used, in fp32."""
        shape, kernels = self.run.shape, Kernels()
        mine = (shape.layers * shape.block_parameters + shape.other_parameters) / self.run.gpus
        kernels.add("memory", memory(self.hardware, "reduction", FULL_WIDTH * mine))
        kernels.add("memory", memory(self.hardware, "elementwise", 2 * FULL_WIDTH * mine))
        kernels.add("memory", memory(self.hardware, "optimizer", ADAMW_BYTES * mine))
        kernels.add("memory", memory(self.hardware, "copy", (FULL_WIDTH + WIDTH) * mine))
        return kernels

    def _flattened(self, parameters: float) -> Kernels:
        """FSDP1: gradients of a unit are copied end to end into one, as autograd takes back its views."""
        kernels = Kernels()
        kernels.add("memory", memory(self.hardware, "copy", 2 * WIDTH * parameters))
        return kernels

    def _scattered(self, parameters: float) -> float:
        """Seconds in which a unit's gradient is divided by what keeps sums in range, beside compute, and
        then summed."""
        divided_s = memory(self.hardware, "elementwise", 2 * WIDTH * parameters)
        return divided_s + self._collective("reduce_scatter", parameters)

    def _collective(self, kind: str, parameters: float) -> float:
        gpus = self.run.gpus
        together = min(gpus, GPUS_PER_NODE)
        asked = (self.hardware, kind, WIDTH * parameters, gpus, together)
        return collective(*asked, network=self.run.network)

    def estimate(self) -> Estimate:
        """Compute and communication each in order, the second one unit ahead of the first."""
        run, shape = self.run, self.run.shape
        busy: dict[KernelKind, float] = defaultdict(float)
        gather = self._collective("all_gather", shape.block_parameters)
        scatter = self._scattered(shape.block_parameters)
        flat = self._flattened(shape.block_parameters)
        flat_rest = self._flattened(shape.other_parameters)
        gather_rest = self._collective("all_gather", shape.other_parameters)
        scatter_rest = self._scattered(shape.other_parameters)
        computes = talks = 0.0
        for _ in range(max(1, run.micro_batches)):
            ended = [computes, computes]
            computes = talks = max(computes, talks) + gather_rest
            for _layer in range(shape.layers):
                talks = max(talks, ended[-2]) + gather  # two units are there at a time
                computes = max(computes, talks) + self.block_forward.total
                ended.append(computes)
            computes += self.head_forward.total + self.head_backward.total
            again = gather if run.gathers_again else 0.0
            talks = max(talks, ended[-2]) + again
            for _layer in range(shape.layers):
                ready = talks
                talks += again  # of the block before, ahead
                computes = max(computes, ready) + self.block_backward.total + flat.total
                if run.checkpointing:
                    computes += self.block_again.total
                talks = max(talks, computes) + scatter
            computes += flat_rest.total
            talks = max(talks, computes) + scatter_rest
        seconds = max(computes, talks) + self.optimizer.total
        times = max(1, run.micro_batches)
        blocks = times * shape.layers
        pieces = (
            (self.block_forward, blocks),
            (self.block_again, blocks if run.checkpointing else 0),
            (self.block_backward, blocks),
            (flat, blocks),
            (flat_rest, times),
            (self.head_forward, times),
            (self.head_backward, times),
            (self.optimizer, 1),
        )
        for kernels, count in pieces:
            for kind, each in kernels.seconds.items():
                busy[kind] += count * each
        waits = seconds - sum(busy.values())
        taken = {**busy, "collective": max(0.0, waits)}
        low = sum(each * range_of(self.hardware, kind).low for kind, each in taken.items())
        high = sum(each * range_of(self.hardware, kind).high for kind, each in taken.items())
        return Estimate(seconds, low, high, {**busy}, waits)
