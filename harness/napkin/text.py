"""The derivation for people: plain text, one line a term, then memory and time by phase, and the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from harness.napkin.memory import PARTS, Memory, Moment, Sizes, required_bytes
from harness.napkin.terms import Term, sum_of
from harness.napkin.timing import Timing
from harness.napkin.weights import SIZES, Weight

GIB = 2**30
WIDTH = 80
"""Columns. The derivation is the same text on every terminal."""
_SHORT = {
    "parameters": "params",
    "gathered_parameters": "gather.",
    "gradients": "grads",
    "optimizer_state": "optim.",
    "activations": "kept",
    "temporaries": "temps",
    "setup": "after setup",
    "optimizer_step": "optimizer step",
}
_ADVICE = {
    "compute": "compute bound: faster matrix units or fewer FLOPs would help",
    "memory": "memory bound: a larger micro batch, fused kernels or more bandwidth would help",
    "host": "host bound: the GPU waits for the host or its link; a larger micro batch would help",
}


def render(name: str, memory: Memory) -> str:
    """The whole derivation of `memory`, ending with a newline."""
    terms, section = derive_terms(memory), ""
    lines = [*_heading(name, memory, terms)]
    for term in terms:
        if term.section != section:
            section = term.section
            lines += ["", f"{section:<{WIDTH - 10}} {'GiB':>9}"]
        *above, head = _folded(f"  {term.name}: {term.formula}", WIDTH - 10)
        lines += [*above, f"{head:<{WIDTH - 10}} {term.size_bytes / GIB:9.3f}"]
        lines += _folded(f"      by: {term.source}", WIDTH)
    lines += [*_phases(memory), *_timing(memory)]
    for warning in memory.sizes.built.surprises:
        lines += ["", *_folded(f"warning: {warning}", WIDTH)]
    return "\n".join(lines) + "\n"


def derive_terms(memory: Memory) -> list[Term]:
    """Every term, in the order of the derivation."""
    sizes = memory.sizes
    return [*_parameters(sizes), *_states(sizes), *_kept(sizes), *_others(sizes)]


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="      ", break_on_hyphens=False)


def _heading(name: str, memory: Memory, terms: Iterable[Term]) -> Iterator[str]:
    sizes, recipe = memory.sizes, memory.sizes.recipe
    shape, acts = sizes.built.shape, sizes.activations
    yield f"{name} on {sizes.hardware.datasheet.title}: {recipe.model}, {shape.layers} {shape.family} layers"
    if recipe.distributed:
        mesh = {name: getattr(recipe, name) for name in ("dp_replicate", "dp_shard", "tp")}
        shown = " × ".join(f"{name} {size}" for name, size in mesh.items() if size > 1) or "one"
        yield f"  {recipe.world_size} ranks: {shown}; what follows is one rank's"
    used = {
        letter for term in terms for part in term.formula.split() for letter in part.strip("[").split("·")
    }
    shown = [f"{k} = {size:,} ({means})" for k, (size, means) in acts.dims.letters.items() if k in used]
    yield from _folded("  " + ", ".join(shown), WIDTH)
    yield f"  attention: {acts.described}, kernel: {acts.kernel}"


def _parameters(sizes: Sizes) -> Iterator[Term]:
    section, layers, groups = "Parameters", sizes.built.shape.layers, dict[str, list[Weight]]()
    for weight in sizes.outer:
        yield Term(section, weight.name, weight.formula, weight.total_bytes, "the config's sizes")
    for weight in sizes.in_blocks:
        kind = "MLP projections" if weight.name.startswith("mlp") else "attention projections"
        kind = "adapters" if weight.adapter else kind if weight.matrix else "norms and biases"
        groups.setdefault(f"{kind}, {weight.dtype}", []).append(weight)
    for name, weights in groups.items():
        each = [f"{'' if w.count == layers else f'{w.count}/{layers}·'}({w.formula})" for w in weights]
        inner = " + ".join(f"{n}·{f}" if (n := each.count(f)) > 1 else f for f in dict.fromkeys(each))
        source = (
            "arXiv 2305.14314, section 3, or 2208.07339" if weights[0].quantized else "the config's sizes"
        )
        source = "arXiv 2106.09685 (LoRA), 2205.05638 (IA3)" if weights[0].adapter else source
        yield Term(section, name, f"{layers} layers × [{inner}]", sum(w.total_bytes for w in weights), source)
    if size := sizes.built.buffer_bytes:
        yield Term(section, "buffers", f"2·{size // 8} × 4 B", size, "rotary frequencies, arXiv 2104.09864")


def _states(sizes: Sizes) -> Iterator[Term]:
    """Gradients, moments, copies, what the step needs for a moment, and what ranks have whole for a while."""
    step, units, counts = sizes.optimizer, sizes.units, dict[str, int]()
    for weight in sizes.trained:
        counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.elements * weight.count
    count, formula = (
        sum(counts.values()),
        " + ".join(f"{n:,} × {SIZES[dtype]} B" for dtype, n in counts.items()),
    )
    where = " (in host memory)" if sizes.recipe.steps_on_host else ""
    each, fsdp = "{:.4g} B × " + f"{count:,}", "torch/distributed/fsdp/_fully_shard"
    rows = [
        ("Gradients", f"of {count:,} trained parameters", formula, sizes.gradient_bytes, ".grad of each"),
        ("Gradients", "DDP's copy", "buckets, as many bytes", sizes.bucket_bytes, "c10d/reducer.cpp"),
        ("Optimizer", f"{step.name} state{where}", each, step.state_bytes - step.paged_bytes, "torch/optim"),
        ("Optimizer", f"copy that is stepped{where}", each, step.copy_bytes, "arXiv 1710.03740, 3.1"),
        ("Optimizer", "paged state (unified memory)", each, step.paged_bytes, "arXiv 2305.14314, 3"),
        ("Optimizer", f"temporary of a {step.implementation} step{where}", each, step.step_bytes, "adam.py"),
        ("Whole for a while", "outside the blocks", "until backward ends", units.own, fsdp),
        ("Whole for a while", "a block and two buffers", "3 × its weights", 3 * units.block, fsdp),
        ("Whole for a while", "a block's gradients", "made, and reduced", units.made + units.reduced, fsdp),
    ]
    for section, name, formula, size, source in rows:
        if size or "state" in name:
            yield Term(section, name, formula.format(size / max(1, count)), size, source)


def _kept(sizes: Sizes) -> Iterator[Term]:
    """What one block of each kind keeps for backward, tensor by tensor, then all blocks, then the loss."""
    acts, shape = sizes.activations, sizes.built.shape
    for block in shape.blocks:
        title = "One block, computed again in backward" if acts.recomputes else "Kept by one block"
        title += f" ({block.count} of {block.mixer}, {block.feed})" if len(shape.blocks) > 1 else ""
        yield from _shown(title, acts.kept_by(block))
    formula = " + ".join(f"{count} × {kept:,} B" for count, kept, _ in sizes.kept)
    if acts.recomputes:
        formula = f"{shape.layers} layers × [{acts.block_input.formula}]"
    where = "in host memory" if sizes.recipe.activations_on_host else "arXiv 1604.06174, or the lines above"
    yield Term("Kept for backward", "all blocks", formula, sizes.kept_by_blocks, where)
    yield from _shown("Kept for backward by the loss", acts.kept_by_loss)
    for moment, terms in (
        ("forward ends", acts.held_after_forward),
        ("backward begins", acts.held_in_backward),
    ):
        yield from (term._replace(section=f"Loss, when {moment}") for term in terms)


def _shown(section: str, terms: list[Term]) -> Iterator[Term]:
    """`terms` in a section, those alike as one, and those under 1/500 of the sum as another."""
    whole, groups = sum_of(terms), dict[Term, int]()
    for term in terms:
        if term.size_bytes * 500 >= whole:
            groups[term] = groups.get(term, 0) + 1
    for term, n in groups.items():
        times = f"{n} × [{term.formula}]" if n > 1 else term.formula
        yield Term(section, term.name, times, n * term.size_bytes, f"kept by {term.source}")
    if rest := whole - sum(n * term.size_bytes for term, n in groups.items()):
        yield Term(section, "small tensors", "each under 1/500 of the sum", rest, "statistics, ranks")


def _others(sizes: Sizes) -> Iterator[Term]:
    """Inputs, workspaces; and beyond the allocator, the CUDA context."""
    hardware, tokens = sizes.hardware, sizes.recipe.tokens_per_step
    workspaces, context = hardware.cublas_workspace_bytes, hardware.calibration.cuda_context_bytes
    rows = [
        ("inputs", f"{tokens:,} tokens of ids and labels, 8 B each", sizes.input_bytes, "int64"),
        (
            "cuBLAS workspaces",
            "2 threads × 1 workspace",
            workspaces,
            "aten/src/ATen/cuda/CublasHandlePool.cpp",
        ),
        ("autocast's weight copies", "16 bit, of trained weights", sizes.weight_copies, "autocast_mode.cpp"),
        ("CUDA context (not in the sums)", "driver and kernels", context, "harness/hardware/hardware.py"),
        ("host memory", "what is offloaded or paged", sizes.host_bytes, "recipe: offload"),
    ]
    yield from (Term("Other", *row) for row in rows if row[2])


def _phases(memory: Memory) -> Iterator[str]:
    sizes, rows = memory.sizes, dict[str, Moment]()
    left_out = "inputs" if sizes.units.layers else "gathered_parameters"  # they are small beside a whole unit
    parts = [part for part in PARTS if part != left_out]
    for moment in memory.moments:
        if moment.phase not in rows or moment.total_bytes > rows[moment.phase].total_bytes:
            rows[moment.phase] = moment
    titles = "".join(f"{_SHORT.get(part, part):>7}" for part in ("total", *parts))
    yield from ("", f"{'Memory by phase, GiB':<20}{titles}")
    for row in rows.values():
        numbers = (size / GIB for size in (row.total_bytes, *(getattr(row, part) for part in parts)))
        yield f"  {_SHORT.get(row.phase, row.phase):<18}" + "".join(f"{_number(size):>7}" for size in numbers)
        yield from _folded(f"      {'the peak: ' if row is memory.peak else ''}{row.where}", WIDTH)
    peak, needed, available = memory.peak.total_bytes, required_bytes(memory), sizes.hardware.memory_bytes
    verdict = "fits" if needed <= available else "DOES NOT FIT (see `harness fit`)"
    sums = f"{peak / GIB:.2f} GiB + CUDA context {(needed - peak) / GIB:.2f} = {needed / GIB:.2f}"
    yield f"  peak {sums} of {available / GIB:.2f} GiB: {verdict}"
    yield "  About right: `harness simulate` tells to the byte, and what the allocator reserves."


def _number(number: float) -> str:
    """At most six characters up to a million."""
    return f"{number:.3f}" if number < 10 else f"{number:.2f}" if number < 1000 else f"{number:.0f}"


def _timing(memory: Memory) -> Iterator[str]:
    sizes, timing = memory.sizes, Timing(memory.sizes)
    columns = ("ms", "TFLOP", "GB", "compute", "memory", "launch", "link")
    yield from ("", f"{'Time by phase, ms':<17}" + "".join(f"{column:>8}" for column in columns) + " waits")
    for name, phase in timing.phases.items():
        link = phase.transfer_s + phase.waited_s + phase.sent_s
        seconds = (phase.time.compute_s, phase.time.memory_s, phase.time.host_s, link)
        numbers = [
            phase.seconds * 1e3,
            phase.flops / 1e12,
            phase.bytes_moved / 1e9,
            *(s * 1e3 for s in seconds),
        ]
        waits = "host" if phase.seconds > phase.time.device_s else phase.time.bound
        yield f"  {_SHORT.get(name, name):<15}" + "".join(f"{_number(n):>8}" for n in numbers) + f" {waits}"
    recomputed = timing.phases["backward"].recomputed_flops / timing.hardware_flops
    mfu, hfu = timing.utilization(timing.model_flops), timing.utilization(timing.hardware_flops)
    (intensity, balance), dtype = timing.intensities, sizes.recipe.compute_dtype
    yield f"  step {timing.seconds * 1e3:,.1f} ms, {timing.tokens_per_s:,.0f} tokens/s"
    yield f"  MFU {mfu:.1%}, HFU {hfu:.1%} ({recomputed:.0%} of the FLOPs are recomputation)"
    yield f"  {_ADVICE[timing.bound]}"
    yield f"  arithmetic intensity {intensity:.0f} FLOP/byte, machine balance {balance:.0f} ({dtype})"
    if sizes.recipe.distributed:
        waited = sum(phase.exposed_s for phase in timing.phases.values())
        yield f"  of the step, {waited * 1e3:,.1f} ms wait for other ranks"
    yield f"  rates: {sizes.hardware.calibration.source}"
