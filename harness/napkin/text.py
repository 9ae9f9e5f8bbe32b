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
    terms = derive_terms(memory)
    lines = [*_heading(name, memory, terms), *_lines(terms), *_phases(memory), *_timing(memory)]
    for warning in memory.sizes.built.surprises:
        lines += ["", *_folded(f"warning: {warning}", WIDTH)]
    return "\n".join(lines) + "\n"


def derive_terms(memory: Memory) -> list[Term]:
    """Every term, in the order of the derivation."""
    sizes = memory.sizes
    return [*_parameters(sizes), *_states(sizes), *sizes.units.terms, *_kept(sizes), *_loss(sizes), *_others(sizes)]


def _heading(name: str, memory: Memory, terms: list[Term]) -> Iterator[str]:
    sizes, recipe = memory.sizes, memory.sizes.recipe
    shape = sizes.built.shape
    yield f"{name} on {sizes.hardware.datasheet.title}: {recipe.model}, {shape.layers} {shape.family} layers"
    if recipe.distributed:
        mesh = {name: getattr(recipe, name) for name in ("dp_replicate", "dp_shard", "tp")}
        shown = " × ".join(f"{name} {size}" for name, size in mesh.items() if size > 1) or "one"
        yield f"  {recipe.world_size} ranks: {shown}; what follows is one rank's"
    used = {letter for term in terms for part in term.formula.split() for letter in part.strip("[").split("·")}
    known = sizes.activations.dims.letters.items()
    shown = ", ".join(f"{letter} = {size:,} ({means})" for letter, (size, means) in known if letter in used)
    yield from _folded("  " + shown, WIDTH)
    yield f"  attention: {recipe.attention}, kernel: {sizes.activations.kernel}"


def _parameters(sizes: Sizes) -> Iterator[Term]:
    layers, section = sizes.built.shape.layers, "Parameters"
    groups: dict[str, list[Weight]] = {}
    for weight in sizes.in_blocks:
        kind = "MLP projections" if weight.name.startswith("mlp") else "attention projections"
        kind = "adapters" if weight.adapter else kind if weight.matrix else "norms and biases"
        groups.setdefault(f"{kind}, {weight.dtype}", []).append(weight)
    for weight in sizes.outer:
        yield Term(section, weight.name, weight.formula, weight.total_bytes, _source(weight))
    for name, weights in groups.items():
        each = [f"{'' if w.count == layers else f'{w.count}/{layers}·'}({w.formula})" for w in weights]
        times = {formula: each.count(formula) for formula in each}
        inner = " + ".join(f"{n}·{formula}" if n > 1 else formula for formula, n in times.items())
        size = sum(w.total_bytes for w in weights)
        yield Term(section, name, f"{layers} layers × [{inner}]", size, _source(weights[0]))
    if size := sizes.built.buffer_bytes:
        yield Term(section, "buffers", f"2·{size // 8} × 4 B", size, "rotary frequencies, arXiv 2104.09864")


def _source(weight: Weight) -> str:
    if weight.quantized:
        return "arXiv 2305.14314, section 3, or 2208.07339; bitsandbytes.functional"
    lora = "arXiv 2106.09685 (LoRA: rank · (inputs + outputs)), 2205.05638 (IA3: one scale a feature)"
    return lora if weight.adapter else "the config's sizes"


def _states(sizes: Sizes) -> Iterator[Term]:
    """Gradients, moments, copies, and what the step needs for a moment."""
    recipe, step, counts = sizes.recipe, sizes.optimizer, dict[str, int]()
    for weight in sizes.trained:
        counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.elements * weight.count
    count, formula = sum(counts.values()), " + ".join(f"{n:,} × {SIZES[dtype]} B" for dtype, n in counts.items())
    note = "freed as each is stepped" if step.in_backward else ".grad of every trained weight"
    yield Term("Gradients", f"of {count:,} trained parameters", formula, sizes.gradient_bytes, note)
    if size := sizes.bucket_bytes:
        source = "torch/csrc/distributed/c10d/reducer.cpp, gradient_as_bucket_view=False"
        yield Term("Gradients", "DDP's copy", "as many bytes", size, source)
    where = " (in host memory)" if recipe.steps_on_host else ""
    source = "arXiv 2110.02861; bitsandbytes/optim/optimizer.py" if recipe.by_bitsandbytes else "torch/optim"
    rows = [
        (f"{step.name} state{where}", step.state_bytes - step.paged_bytes, source),
        (f"copy that is stepped{where}", step.copy_bytes, "arXiv 1710.03740, 3.1"),
        ("paged state (unified memory)", step.paged_bytes, "arXiv 2305.14314, 3"),
        (f"temporary of a {step.implementation} step{where}", step.step_bytes, "torch/optim/adam.py"),
    ]
    for name, size, by in rows[:1] + [row for row in rows[1:] if row[1]]:
        yield Term("Optimizer", name, f"{size / max(1, count):.4g} B × {count:,}", size, by)


def _kept(sizes: Sizes) -> Iterator[Term]:
    """What one block of each kind keeps for backward, tensor by tensor, then all blocks."""
    acts, shape, recipe = sizes.activations, sizes.built.shape, sizes.recipe
    again = acts.recomputes
    for block in shape.blocks:
        title = "One block, computed again in backward" if again else "Kept by one block"
        title += f" ({block.count} of {block.mixer}, {block.feed})" if len(shape.blocks) > 1 else ""
        yield from _shown(title, acts.kept_by(block))
    formula = " + ".join(f"{count} × {kept:,} B" for count, kept, _ in sizes.kept)
    source = "in host memory" if recipe.activations_on_host else "sum of the lines above"
    name, one = "all blocks", acts.block_input
    if again:
        name, formula, source = "block inputs (checkpointing)", f"{shape.layers} layers × [{one.formula}]", one.source
    yield Term("Kept for backward", name, formula, sizes.kept_by_blocks, source)


def _shown(section: str, terms: list[Term]) -> Iterator[Term]:
    """`terms` in a section, those alike as one, and those under 1/500 of the sum as another."""
    whole, groups = sum_of(terms), dict[tuple[str, str, str], list[Term]]()
    for term in terms:
        small = term.size_bytes * 500 < whole
        key = ("small tensors", "", "statistics, ranks") if small else (term.name, term.formula, term.source)
        groups.setdefault(key, []).append(term)
    for (name, formula, source), alike in groups.items():
        times = f"{len(alike)} × [{formula}]" if len(alike) > 1 else formula
        shown = times if formula else "each under 1/500 of the sum"
        yield Term(section, name, shown, sum_of(alike), f"kept by {source}")


def _loss(sizes: Sizes) -> Iterator[Term]:
    acts = sizes.activations
    yield from _shown("Kept for backward by the loss", acts.kept_by_loss)
    moments = {"when forward ends": acts.held_after_forward, "in backward": acts.held_in_backward}
    for moment, terms in moments.items():
        for term in terms:
            yield Term(f"Loss, {moment}", term.name, term.formula, term.size_bytes, term.source)


def _others(sizes: Sizes) -> Iterator[Term]:
    """Inputs, workspaces; and beyond the allocator, the CUDA context."""
    hardware, tokens = sizes.hardware, sizes.recipe.tokens_per_step
    workspaces, context = hardware.cublas_workspace_bytes, hardware.calibration.cuda_context_bytes
    rows = [
        ("inputs", f"{tokens:,} tokens of ids and labels, 8 B each", sizes.input_bytes, "int64"),
        ("cuBLAS workspaces", "2 threads × 1 workspace", workspaces, "aten/src/ATen/cuda/CublasHandlePool.cpp"),
        ("autocast's weight copies", "16 bit, of trained weights", sizes.weight_copies, "autocast_mode.cpp"),
        ("CUDA context (not in the sums)", "driver and kernels", context, "harness/hardware/hardware.py"),
        ("host memory", "what is offloaded or paged", sizes.host_bytes, "recipe: offload"),
    ]
    for name, formula, size, source in rows:
        if size:
            yield Term("Other", name, formula, size, source)


def _lines(terms: Iterable[Term]) -> Iterator[str]:
    section = ""
    for term in terms:
        if term.section != section:
            section = term.section
            yield from ("", f"{section:<{WIDTH - 10}} {'GiB':>9}")
        *above, head = _folded(f"  {term.name}: {term.formula}", WIDTH - 10)
        yield from (*above, f"{head:<{WIDTH - 10}} {term.size_bytes / GIB:9.3f}")
        yield from _folded(f"      by: {term.source}", WIDTH)


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="      ", break_on_hyphens=False)


def _phases(memory: Memory) -> Iterator[str]:
    sizes, rows = memory.sizes, dict[str, Moment]()
    # the inputs of a micro batch are small beside a whole unit
    left_out = "inputs" if sizes.units.layers else "gathered_parameters"
    parts = [part for part in PARTS if part != left_out]
    for moment in memory.moments:
        if moment.phase not in rows or moment.total_bytes > rows[moment.phase].total_bytes:
            rows[moment.phase] = moment
    head = "".join(f"{_SHORT.get(part, part):>7}" for part in ("total", *parts))
    yield from ("", f"{'Memory by phase, GiB':<20}{head}")
    for row in rows.values():
        numbers = (size / GIB for size in (row.total_bytes, *(getattr(row, part) for part in parts)))
        yield f"  {_SHORT.get(row.phase, row.phase):<18}" + "".join(f"{_number(size):>7}" for size in numbers)
        yield from _folded(f"      {'the peak: ' if row is memory.peak else ''}{row.where}", WIDTH)
    peak, needed, available = memory.peak.total_bytes, required_bytes(memory), sizes.hardware.memory_bytes
    verdict = "fits" if needed <= available else "DOES NOT FIT (see `harness fit`)"
    yield (
        f"  peak {peak / GIB:.2f} GiB + CUDA context {(needed - peak) / GIB:.2f} "
        f"= {needed / GIB:.2f} of {available / GIB:.2f} GiB: {verdict}"
    )
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
        numbers = [phase.seconds * 1e3, phase.flops / 1e12, phase.bytes_moved / 1e9, *(s * 1e3 for s in seconds)]
        waits = "host" if phase.seconds > phase.time.device_s else phase.time.bound
        yield f"  {_SHORT.get(name, name):<15}" + "".join(f"{_number(n):>8}" for n in numbers) + f" {waits}"
    recomputed = timing.phases["backward"].recomputed_flops / timing.hardware_flops
    mfu, hfu = timing.utilization(timing.model_flops), timing.utilization(timing.hardware_flops)
    intensity, balance = timing.intensities
    yield f"  step {timing.seconds * 1e3:,.1f} ms, {timing.tokens_per_s:,.0f} tokens/s"
    yield f"  MFU {mfu:.1%}, HFU {hfu:.1%} ({recomputed:.0%} of the FLOPs are recomputation)"
    yield f"  {_ADVICE[timing.bound]}"
    dtype = sizes.recipe.compute_dtype
    yield f"  arithmetic intensity {intensity:.0f} FLOP/byte, machine balance {balance:.0f} ({dtype})"
    if sizes.recipe.distributed:
        waited = sum(phase.exposed_s for phase in timing.phases.values())
        yield f"  of the step, {waited * 1e3:,.1f} ms wait for other ranks"
    yield f"  rates: {sizes.hardware.calibration.source}"
