"""The time of a step by phase: the FLOPs and bytes of its layers, over what the device can do. No torch.

A product of T rows with a matrix of n elements takes 2·T·n FLOPs, its backward as many for the input and as
many for a weight that trains (Kaplan et al., arXiv 2001.08361). Attention counts the whole square of scores.
What is kept for backward was written once and is read twice; what frozen weights spare an operator to keep,
it computes all the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from harness.architecture import Matrix, matrices_of
from harness.hardware import GPUS_PER_NODE, NETWORK, Hardware, PhaseTime, StepTime, Work, sent_share
from harness.kernel_time import collective, time_of, transfer
from harness.napkin.activations import DEQUANTIZED
from harness.napkin.memory import Memory
from harness.napkin.terms import sum_of
from harness.napkin.weights import SIZES

PASSES = 3
"""How often each byte that is kept is read or written."""
OPERATORS, OPERATORS_OUTSIDE = (18, 20), (50, 25)
OPERATORS_OF_ROTARY, OPERATORS_OF_NORM, OPERATORS_OF_EAGER = (3, 8), (7, 12), (9, 11)
"""How many operators forward and backward launch for a block besides its matrix products, and outside of the
blocks; in a block for rotary positions, each RMS norm, and eager attention: as the hosts of simulated steps
count them."""
OPERATORS_OF_LORA, OPERATORS_OF_CHUNK = 8, 12
"""How many either launches for an adapter, and forward for a chunk of a loss in chunks."""
HOOKS_OF_CHECKPOINT, HOOKS_OF_UNIT, HOOKS_OF_WEIGHT = (25, 40), (23, 34), 1.6
"""How many operators take the host as long as what PyTorch calls around those of forward and of backward: for
each block that is checkpointed, each unit of FSDP2, and each of its weights in either, or of DDP's in
backward."""
COMPILED_PASSES = 1.2, 2.3
"""The passes over what a compiled block keeps, in forward and in backward, as Inductor counts them for the
kernels that it makes (profiles/cpu/compiled_bytes.json)."""

FP8_EAGER, FP8_COMPILED = (34, 8), (5, 0)
"""Bytes moved for each element that is cast to fp8, and kernels launched for each tensor. Eager code finds
the largest value, multiplies with the scale in fp32, clamps and rounds (torchao/float8/float8_utils.py);
compiled code reads the tensor twice and writes it once."""


def step_time(memory: Memory) -> StepTime:
    """The time of the step whose memory was estimated."""
    works, recipe = _Works(memory), memory.recipe
    recomputed = sum(work.flops for work in (*works.repeated, *works.of_tiles))
    peak = memory.hardware.peak_flops(recipe.compute_dtype)
    return StepTime(works.phases, recipe.global_tokens_per_step, recomputed, peak)


def sent_byte_s(hardware: Hardware, ranks: Sequence[int]) -> float:
    """Seconds that a rank takes for each byte that it sends, in a gather of 1 GB among `ranks`, placed in
    order on machines of GPUS_PER_NODE. As in measured collectives, which do not reach the datasheet's link:
    cards that cannot read each other's memory take ten times as long. 0 for a rank alone."""
    if len(ranks) < 2:
        return 0.0
    on_one_node = min(Counter(rank // GPUS_PER_NODE for rank in ranks).values())
    seconds = collective(hardware, "all_gather", 1e9, len(ranks), on_one_node, network=NETWORK.value)
    return seconds / (1e9 * sent_share("all_gather", len(ranks)))


class _Sent(NamedTuple):
    """Bytes that a rank sends in a phase."""

    in_all: float
    alone: float
    """Those that nothing is computed beside."""


NOTHING_SENT = _Sent(0.0, 0.0)


class _Works:
    """What a step computes, moves and sends."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.recipe, self.hardware = memory, memory.recipe, memory.hardware
        self.acts, self.built, self.micro = memory.activations, memory.built, memory.micro_batches
        self.moving = self.acts if self.acts.compiled else self.acts.as_if_trained()

    @property
    def phases(self) -> dict[str, PhaseTime]:
        """The time of data, forward, backward and optimizer_step."""
        memory, recipe, step, micro = self.memory, self.recipe, self.memory.optimizer, self.micro
        on_host, gradients, inputs = recipe.parameters_on_host, memory.gradient_bytes, memory.input_bytes
        # checkpoints cross on the compute stream; while what the loss keeps does, nothing is left to compute
        waits = memory.kept_on_host if recipe.checkpoints_on_host else 0
        moved = micro * (memory.kept_on_host - waits + (memory.parameter_bytes if memory.away else 0))
        waits = micro * (waits + memory.kept_by_loss * recipe.activations_on_host)
        forward = self._layers(1) * (1 + recipe.computes_reference) * (1 + recipe.unpaired)
        backward = [*self.repeated, *self.of_tiles, *self._layers(2)]
        backward += self._products(self.built.head, 1) if recipe.by_trl else []  # its tiles, made anew
        if (cast := self._cast_weights()) and not recipe.fsdp and not self.acts.compiled:
            casts = Work(0, cast, self.built.shape.layers, walk="cast").times(micro)
            forward.append(casts)
            backward += [casts] * (recipe.trains_base + self.acts.recomputes)
        added = 3 * gradients * (micro - 1)  # to gradients of earlier micro batches
        launches = sum(w.count for w in memory.trained) * (micro - 1)
        backward.append(Work(0, 0 if on_host else added, launches))
        backward += [step.update] if step.in_backward else []
        if recipe.trains_base:  # of the embeddings, written; with a tied head two gradients make a third
            table = self.built.shape.vocab * self.built.shape.hidden * SIZES[self.built.made_dtype]
            passes = 1 + PASSES * self.built.shape.tied
            backward.append(Work(0, passes * table // recipe.tp, passes).times(micro))
        copies = [self._copied_by_fsdp()] if recipe.fsdp else []
        for works, *own in zip((forward, backward), self._hooks(), *copies, strict=True):
            works += own
        crossing = 2 * gradients * (recipe.steps_on_host and not memory.away)  # and weights back
        steps = [] if recipe.steps_on_host or step.in_backward else [step.update, *step.products]
        stepped = step.update.bytes_moved if recipe.steps_on_host else 0
        sent_forward, sent_backward = self._sent()
        waits_back = waits + micro * gradients * on_host
        phases = {
            "data": self._phase([Work(0, inputs, 2 * micro)], inputs),
            "forward": self._phase(forward, moved, waits, sent=sent_forward),
            "backward": self._phase(backward, moved, waits_back, added * on_host, sent_backward),
            "optimizer_step": self._phase(steps, crossing, 0, stepped),
        }
        back, last = phases["backward"], phases["optimizer_step"]
        ahead_s = max(0.0, back.time.device_s - back.time.host_s)  # the host launches on meanwhile
        of_host = replace(last.time, host_s=max(0.0, last.time.host_s - ahead_s))
        return phases | {"optimizer_step": replace(last, time=of_host)}

    def _cast_weights(self) -> int:
        """The bytes that autocast moves to cast the weights of linear layers from fp32, once in a forward; 0
        where they have the dtype in which they are multiplied."""
        built, width = self.built, self.acts.compute
        own = SIZES[built.loose_dtype]
        linear = [(block.count, m) for block, m in built.matrices if m.linear and not built.storage(m)]
        elements = sum(count * m.elements for count, m in (*linear, (1, built.head)))
        return elements // self.recipe.tp * (own + width) * (own > width)

    @cached_property
    def repeated(self) -> list[Work]:
        """What backward computes again: with checkpointing, or to keep to activation_memory_budget."""
        share = 1.0 if self.acts.recomputes else 1 - self.memory.budget
        return [work.share(share) for work in self._layers(1, again=True)] if share else []

    @cached_property
    def of_tiles(self) -> list[Work]:
        """What backward computes again of MLPs that are computed part by part."""
        works, tiles = list[Work](), self.acts.tiles
        sums = 3 * (tiles - 1) * SIZES[self.built.loose_dtype] * self.recipe.trains_base  # of gradients
        for block in filter(self.acts.tiled, self.built.shape.blocks):
            moved = PASSES * self.acts.kept_by_tiles(block)
            for matrix in matrices_of(self.built.shape, block):
                if matrix.role in ("up", "down"):
                    works += self._products(matrix, block.count, gradients=1)
                    moved += sums * matrix.elements
            works.append(Work(0, moved, OPERATORS[1] * tiles).times(block.count * self.micro))
        return works

    def _sent(self) -> tuple[_Sent, _Sent]:
        """What a rank sends in forward and in backward.

        FSDP2 gathers weights and scatters gradients, those outside of blocks before and after everything;
        DDP sums gradients, which is a scatter and a gather, its last bucket when backward is over; tensor
        parallelism sums the residual stream twice per block in forward and in backward, and waits for it
        (Megatron-LM, arXiv 1909.08053, section 3).
        """
        memory, recipe, layers = self.memory, self.recipe, self.built.shape.layers
        shard = sent_share("all_gather", recipe.dp_shard)
        copies = sent_share("all_reduce", recipe.dp_replicate)
        gathers, blocks = self.micro * shard, layers * memory.block.weights
        again = memory.reshards * gathers * blocks
        scattered = (shard + copies / recipe.dp_shard) * memory.reduced_bytes + copies * memory.bucket_bytes
        stream = recipe.tokens_per_step * self.built.shape.hidden * self.acts.compute
        sums = 4 * layers * sent_share("all_gather", recipe.tp) * stream
        first, last = gathers * memory.own.weights, scattered / layers
        if recipe.fsdp:
            last = scattered * memory.own.reduced / max(1, memory.reduced_bytes)
        forward = _Sent(first + gathers * blocks + sums, first + sums)
        return forward, _Sent(again + recipe.syncs_per_step * scattered + sums, last + sums)

    def _hooks(self) -> list[Work]:
        """What the host does in forward and in backward around their operators."""
        memory, built, layers = self.memory, self.built, self.built.shape.layers
        found = [float(each * layers * self.acts.recomputes) for each in HOOKS_OF_CHECKPOINT]
        if self.recipe.fsdp:
            weights = HOOKS_OF_WEIGHT * sum(w.count for w in (*built.outer, *built.in_blocks))
            found = [n + each * (layers + 1) + weights for n, each in zip(found, HOOKS_OF_UNIT, strict=True)]
        elif self.recipe.ddp:
            found[1] += HOOKS_OF_WEIGHT * sum(w.count for w in memory.trained)
        return [Work(operators=round(each)).times(self.micro) for each in found]

    def _copied_by_fsdp(self) -> tuple[Work, Work]:
        """What FSDP2 copies in forward and in backward beside what it sends: a rank's share into the tensor
        that is gathered, gathered weights into their own tensors, and gradients into one tensor, in the dtype
        that is summed up (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)."""
        memory, layers = self.memory, self.built.shape.layers
        copied = 2 + 2 / self.recipe.dp_shard  # how often each byte of a weight is read or written
        of_blocks, of_own = int(copied * layers * memory.block.weights), int(copied * memory.own.weights)
        made = layers * memory.block.made + memory.own.made + memory.reduced_bytes
        again = self.micro * memory.reshards * of_blocks
        forward = Work(0, of_blocks + of_own, 2 * layers).times(self.micro)
        return forward, Work(0, again + self.recipe.syncs_per_step * made, 3 * layers)

    def _phase(
        self, works: list[Work], moved: int, waits: int = 0, on_host: int = 0, sent: _Sent = NOTHING_SENT
    ) -> PhaseTime:
        """The time of `works`, while `moved` bytes cross the host link and others are `sent` to other ranks.
        The device also waits for `waits` bytes to cross the link, and for work of the host on `on_host`."""
        if self.acts.compiled:  # a compiled graph is launched by one call
            works = [replace(work, operators=0) for work in works]
        hardware, recipe = self.hardware, self.recipe
        time, link = time_of(works, hardware), transfer(hardware, moved)
        waited = transfer(hardware, waits) + on_host / hardware.calibration.host_memory_bandwidth
        tp, apart = recipe.tp, recipe.dp_replicate if recipe.ddp else recipe.dp_shard * recipe.tp
        ranks = range(tp) if tp > 1 else range(0, apart, tp)  # that communicate with each other
        byte_s = sent_byte_s(hardware, ranks)
        exposed = sent.alone * byte_s + max(0.0, (sent.in_all - sent.alone) * byte_s - time.seconds)
        return PhaseTime(works, time, link, waited, sent.in_all, sent.in_all * byte_s, exposed)

    def _products(self, matrix: Matrix, times: int, *, gradients: int = 0) -> list[Work]:
        """The work of `times` products with a matrix in every micro batch, with those of its adapter: in
        forward, or in backward, of which 1 of the `gradients` is that of its input and 2 that of its weight.
        Backward dequantizes a linear layer's weight again; the experts' it has kept since forward."""
        tp, dtype = self.recipe.tp, self.recipe.compute_dtype
        built, width = self.built, self.acts.compute
        rows, n = self.acts.dims.of("B·S·X" if matrix.stacked > 1 else "B·S"), matrix.elements // tp
        moved = (rows * (matrix.inputs + matrix.outputs // tp) + n) * width
        kept = gradients and matrix.stacked > 1
        before = n * width if built.storage(matrix) and not kept else 0  # the weight in 16 bit
        if before and self.recipe.four_bit:  # written from what is stored, and read by the product
            before += built.stored(matrix)[0] // tp
            moved += before
        flops, multiplied = 2 * rows * n // matrix.stacked, "fp8" if built.in_fp8(matrix) else dtype
        m, out, k = max(1, rows // matrix.stacked), max(1, matrix.outputs // tp), matrix.inputs
        shapes = [(m, k, out), (out, k, m)][:gradients] or [(m, out, k)]
        works = [
            Work(flops, moved, 1, "matmul", multiplied, before, (*shape, matrix.stacked)) for shape in shapes
        ]
        if built.in_fp8(matrix):
            # of three products the input, the weight and the output's gradient are factors of two
            size, launches = FP8_COMPILED if self.acts.compiled else FP8_EAGER
            factors = 2 * (rows * (matrix.inputs + matrix.outputs) + n) // 3
            works.append(Work(0, size * factors, 2 * launches).times(len(shapes)))
        if casts := rows * self._cast_bytes(matrix, backward=gradients > 0):
            works.append(Work(0, casts, 2, walk="cast").times(len(shapes)))
        if matrix.name in built.adapted and built.lora:
            works += self._by_lora(matrix, rows, backward=gradients > 0)
        return [work.times(times * self.micro) for work in works]

    def _cast_bytes(self, matrix: Matrix, *, backward: bool) -> int:
        """The bytes that casts around a product move for each row: bitsandbytes casts its input and
        its result; autocast each input that is fp32, and in backward its gradient."""
        acts, width = self.acts, self.acts.compute
        if self.built.storage(matrix) and acts.made != width:
            return (matrix.inputs + matrix.outputs) * (acts.made + width)
        if acts.compiled or not self.recipe.mixed or acts.stream == width or matrix.role not in ("in", "up"):
            return 0
        both = backward and acts.trains_base  # products for gradients, of which one is of the input
        return matrix.inputs * (acts.stream + width) // (1 + both)

    def _by_lora(self, matrix: Matrix, rows: int, *, backward: bool) -> list[Work]:
        """The work of an adapter beside a product: W x + s·B A x (peft/tuners/lora/layer.py). Where it
        computes in another dtype than the layer, x is cast to that, and the sum back to the layer's."""
        wide, width = self.acts.width_of_adapter(matrix), self.acts.made
        into, out = matrix.inputs, matrix.outputs
        flops = 2 * rows * self.built.rank * (into + out) // self.recipe.tp
        products = Work(flops, rows * wide * (into + out), 2, "matmul", self.recipe.compute_dtype)
        rest = OPERATORS_OF_LORA - 2
        if self.acts.compiled:  # in few kernels
            return [products, Work(0, rows * wide * 2 * out, rest)]
        cast, back = (wide + width) * (wide != width), (wide + width) * (wide > width)
        dropped = (2 * wide + 1) * self.acts.drops * into  # with its mask
        if backward:  # two gradients of A and of B; the sum with that of W, the factor
            products = replace(products, bytes_moved=2 * products.bytes_moved)
            moved, casts = dropped + 3 * width * into + 2 * wide * out, cast * (into + out) + back * out
        else:  # the factor is read and written, the sum reads both and writes; peft copies 4-bit results
            copied = 2 * width * self.recipe.four_bit
            moved = dropped + (3 * wide + width + max(wide, width) + copied) * out
            casts = cast * into + back * out
        return [products, Work(0, rows * moved, rest - 2), Work(0, rows * casts, 2, walk="cast")]

    def _is_last(self, matrix: Matrix) -> bool:
        """Whether nothing after this matrix product keeps its result, so that recomputation ends before it
        (torch.utils.checkpoint stops early)."""
        shape, built = self.built.shape, self.built
        followed = shape.norms > 2 or shape.residual_dropout or matrix.name in built.adapted
        return matrix.role == "down" and not followed

    def _layers(self, passes: int, *, again: bool = False) -> list[Work]:
        """The work of all blocks, head and loss in forward, or in backward (of two `passes`). With `again`,
        only what checkpointing repeats: not the head, nor the last product."""
        gradients = (passes - 1) * (1 + self.recipe.trains_base)
        keeps_products = again and self.acts.keeps_products
        built, acts, d, works = self.built, self.acts, self.acts.dims.of, list[Work]()
        for block in built.shape.blocks:
            count = block.count
            for matrix in matrices_of(built.shape, block):
                if again and self._is_last(matrix):
                    continue
                if not keeps_products or built.storage(matrix):
                    works += self._products(matrix, count, gradients=gradients)
            times = count * self.micro
            over = COMPILED_PASSES[passes - 1] if acts.compiled else PASSES * passes
            kept = self.moving.kept_by(block)
            read = sum_of(term for term in kept if term.source != DEQUANTIZED)  # products read that
            read += acts.kept_by_tiles(block)
            works.append(Work(0, int(read * over), self._operators(passes)).times(times))
            if block.attends and not keeps_products:
                flops = int(2 * d("B·N·S·S") * (d("D") + d("U")) * acts.seen(block))
                # a fused backward makes the scores once more
                flops += flops // 4 if passes == 2 and acts.kernel == "fused" else 0
                scores = 0 if acts.kernel == "fused" else d("B·N·S·S") * 4 * PASSES
                attention = Work(flops, scores, 1, "attention", self.recipe.compute_dtype)
                works.append(attention.times(times * passes))
        if again or acts.in_chunks:
            return works if again or passes == 2 else [*works, *self._loss_in_chunks()]
        return [*works, *self._products(built.head, 1, gradients=gradients), *self._loss(passes)]

    def _operators(self, passes: int) -> int:
        """How many operators forward, or backward (of two passes), launches for a block besides products."""
        shape, which = self.built.shape, passes - 1
        norms = 0 if shape.layer_norm or self.acts.by_liger else shape.norms + 2 * shape.qk_norm
        of_rotary = OPERATORS_OF_ROTARY[which] * (not shape.positions)
        of_eager = OPERATORS_OF_EAGER[which] * (self.acts.kernel == "eager")
        return OPERATORS[which] + of_rotary + norms * OPERATORS_OF_NORM[which] + of_eager

    def _loss_in_chunks(self) -> list[Work]:
        """The work of a loss that makes a chunk of logits at a time, and both gradients in forward: each
        product reads or writes the head's whole weight, and its gradient grows with each chunk."""
        head, rows, width = self.built.head, self.acts.chunk, self.acts.compute
        trains = self.recipe.trains_base
        chunks, n = -(-self.acts.dims.of("B·S") // rows) * self.micro, head.elements // self.recipe.tp
        moved, shape = (rows * (head.inputs + head.outputs) + n) * width, (rows, head.outputs, head.inputs, 1)
        product = Work(2 * rows * n, moved, 1, "matmul", self.recipe.compute_dtype, shape=shape)
        loss = Work(0, 4 * PASSES * rows * head.outputs + n * width * trains, OPERATORS_OF_CHUNK)
        outside = Work(operators=OPERATORS_OUTSIDE[0]).times(self.micro)
        return [product.times((2 + trains) * chunks), loss.times(chunks), outside]

    def _loss(self, passes: int) -> list[Work]:
        """The work of the loss in forward, or in backward (of two passes). Logits are cast to fp32 and their
        gradients back; between are log_softmax, and in backward the gradient of what picks the label."""
        logits, width = self.acts.dims.of("B·S") * self.built.head.outputs * self.micro, self.acts.compute
        launches = OPERATORS_OUTSIDE[passes - 1] * self.micro
        if self.acts.compiled or not self.recipe.whole_logits:  # in one kernel: read, and read or written
            return [Work(0, logits * (2 * width if self.acts.compiled else 4 * PASSES), launches)]
        cast, capped = (width + 4) * (width < 4), width * self.built.shape.logit_softcap
        moved, softmax, walk = (
            (4 + 7 * capped, 12, "log_softmax_backward") if passes == 2 else (6 * capped, 8, "log_softmax")
        )
        return [
            Work(0, logits * moved, launches - 2 * self.micro),
            Work(0, logits * cast, self.micro, walk="cast"),
            Work(0, logits * softmax, self.micro, walk=walk),
        ]
