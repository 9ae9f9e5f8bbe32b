"""The derivation for people: plain text, one line a term, then memory and time by phase, and the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from harness.napkin.memory import Memory, Moment, Sizes, rank_terms, required_bytes
from harness.napkin.ranks import described_mesh
from harness.napkin.terms import MEANINGS, Term, sum_of
from harness.napkin.timing import Timing
from harness.napkin.weights import SIZES, Weight

GIB = 2**30
WIDTH = 80
"""Columns. The derivation is the same text on every terminal."""
_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries", "inputs", "other")
_SHORT = {
    "parameters": "params",
    "gathered_parameters": "gather.",
    "gradients": "grads",
    "optimizer_state": "optim.",
    "activations": "kept",
    "temporaries": "temps",
}
_QUANTIZED = "arXiv 2305.14314, section 3, or 2208.07339; bitsandbytes.functional"
_ADVICE = {
    "compute": "compute bound: faster matrix units or fewer FLOPs would help",
    "memory": "memory bound: a larger micro batch, fused kernels or more bandwidth would help",
    "host": "host bound: the GPU waits for the host or its link; a larger micro batch would help",
}


def render(name: str, memory: Memory) -> str:
    """The whole derivation of `memory`, ending with a newline."""
    lines = [*_heading(name, memory), *_lines(memory), *_phases(memory), *_timing(memory)]
    for warning in memory.sizes.built.surprises:
        lines += ["", *_folded(f"warning: {warning}", WIDTH)]
    return "\n".join(lines) + "\n"


def _heading(name: str, memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    shape, acts = sizes.built.whole, sizes.activations
    yield f"{name} on {sizes.hardware.datasheet.title}: {sizes.recipe.model}, {shape.layers} {shape.family} layers"
    if sizes.recipe.distributed:
        yield f"  {described_mesh(sizes.recipe)}; what follows is one rank's"
    used = {letter for term in derive_terms(memory) for part in term.formula.split(" ") for letter in part.split("·")}
    shown = [f"{each} = {acts.numbers[each]:,} ({MEANINGS[each]})" for each in MEANINGS if each in used]
    yield from _folded("  " + ", ".join(shown), WIDTH)
    yield f"  attention: {sizes.recipe.attention}, kernel: {acts.kernel}"


def derive_terms(memory: Memory) -> list[Term]:
    """Every term, in the order of the derivation."""
    sizes = memory.sizes
    return [
        *_parameters(sizes),
        *_states(sizes),
        *rank_terms(sizes),
        *_kept(sizes),
        *_loss(sizes),
        *_others(sizes),
    ]


def _parameters(sizes: Sizes) -> Iterator[Term]:
    section, count = "Parameters", sizes.built.whole.layers
    for weight in sizes.outer:
        yield Term(section, weight.name, weight.formula, weight.total_bytes, _source(weight))
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight in sizes.in_blocks:
        kind = "adapters" if weight.adapter else "norms and biases" if not weight.matrix else "MLP projections"
        if kind == "MLP projections" and not weight.name.startswith("mlp"):
            kind = "attention projections"
        groups.setdefault((kind, weight.dtype), []).append(weight)
    for (kind, dtype), weights in groups.items():
        alike: dict[str, int] = {}
        for weight in weights:
            times = "" if weight.count == count else f"{weight.count} layers × "
            alike[times + f"({weight.formula})"] = alike.get(times + f"({weight.formula})", 0) + 1
        inner = " + ".join(f"{n}·{formula}" if n > 1 else formula for formula, n in alike.items())
        formula = f"{count} layers × [{inner}]" if all(w.count == count for w in weights) else inner
        size = sum(w.total_bytes for w in weights)
        yield Term(section, f"{kind}, {dtype}", formula, size, _source(weights[0]))
    if size := sizes.built.buffer_bytes:
        formula = f"2·{size // 8} × 4 B"
        yield Term(section, "buffers", formula, size, "rotary frequencies, arXiv 2104.09864")


def _source(weight: Weight) -> str:
    if weight.quantized:
        return _QUANTIZED
    lora = "arXiv 2106.09685 (LoRA: rank · (inputs + outputs)), 2205.05638 (IA3: one scale a feature)"
    return lora if weight.adapter else "the config's sizes"


def _states(sizes: Sizes) -> Iterator[Term]:
    """Gradients, moments, copies, and what the step needs for a moment."""
    recipe, trained = sizes.recipe, sizes.trained
    count = sum(w.elements * w.count for w in trained)
    by_dtype = dict.fromkeys(w.dtype for w in trained)
    formula = " + ".join(
        f"{sum(w.elements * w.count for w in trained if w.dtype == dtype):,} × {SIZES[dtype]} B" for dtype in by_dtype
    )
    note = "freed as each is stepped" if recipe.optimizer_in_backward else ".grad of every trained weight"
    yield Term("Gradients", f"of {count:,} trained parameters", formula, sizes.gradient_bytes, note)
    where = " (in host memory)" if recipe.steps_on_host else ""
    source = "arXiv 2110.02861; bitsandbytes/optim/optimizer.py" if recipe.by_bitsandbytes else "torch/optim"
    temporary = 0 if recipe.steps_on_host else sizes.step_bytes
    rows = [
        (f"{recipe.optimizer} state{where}", sizes.state_bytes - sizes.paged_bytes, source),
        (f"copy that is stepped{where}", sizes.copy_bytes, "arXiv 1710.03740, 3.1"),
        ("paged state (unified memory)", sizes.paged_bytes, "arXiv 2305.14314, 3"),
        (f"temporary of a {recipe.optimizer_impl} step", temporary, "torch/optim/adam.py"),
    ]
    for i, (name, size, by) in enumerate(rows):
        if size or i == 0:
            yield Term("Optimizer", name, f"{size / max(1, count):.4g} B × {count:,}", size, by)


def _kept(sizes: Sizes) -> Iterator[Term]:
    """What one block of each kind keeps for backward, tensor by tensor, then all blocks."""
    acts, shape, recipe = sizes.activations, sizes.built.whole, sizes.recipe
    kinds = {f"{block.mixer}, {block.feed}": block for block in shape.blocks}
    for kind, block in kinds.items():
        title = "One block, computed again in backward" if recipe.gradient_checkpointing else "Kept by one block"
        title += f" ({block.count} of {kind})" if len(kinds) > 1 else ""
        yield from _shown(title, acts.kept_by(block))
    if recipe.gradient_checkpointing:
        one = acts.block_input
        formula = f"{shape.layers} layers × [{one.formula}]"
        yield Term("Kept for backward", "block inputs (checkpointing)", formula, sizes.kept_by_blocks, one.source)
    else:
        formula = " + ".join(f"{count} × {kept:,} B" for count, kept, _ in sizes.blocks_kept)
        where = "in host memory" if recipe.activations_on_host else "sum of the lines above"
        yield Term("Kept for backward", "all blocks", formula, sizes.kept_by_blocks, where)


def _shown(section: str, terms: Sequence[Term]) -> Iterator[Term]:
    """`terms` in a section, those alike as one, and those under 1/500 of the sum as another."""
    whole = sum_of(list(terms))
    groups: dict[tuple[str, str], list[Term]] = {}
    for term in terms:
        key = (term.name, term.formula) if term.size_bytes * 500 >= whole else ("small tensors", "")
        groups.setdefault(key, []).append(term)
    for (name, formula), alike in groups.items():
        size = sum_of(alike)
        if not formula:
            yield Term(section, name, "each under 1/500 of the sum", size, "statistics, ranks")
            continue
        times = f"{len(alike)} × [{formula}]" if len(alike) > 1 else formula
        yield Term(section, name, times, size, f"kept by {alike[0].source}")


def _loss(sizes: Sizes) -> Iterator[Term]:
    acts = sizes.activations
    yield from _shown("Kept for backward by the loss", acts.kept_by_loss)
    for term in acts.held_after_forward:
        yield Term("Loss, when forward ends", term.name, term.formula, term.size_bytes, term.source)
    if not sizes.recipe.fused_loss:
        for term in acts.held_in_backward:
            yield Term("Loss, in backward", term.name, term.formula, term.size_bytes, term.source)


def _others(sizes: Sizes) -> Iterator[Term]:
    """Inputs, workspaces; and beyond the allocator, the CUDA context."""
    hardware, recipe = sizes.hardware, sizes.recipe
    rows = [
        ("inputs", f"{recipe.tokens_per_step:,} tokens of ids and labels, 8 B each", sizes.input_bytes, "int64"),
        (
            "cuBLAS workspaces",
            "2 threads × 1 workspace",
            hardware.cublas_workspace_bytes,
            "aten/src/ATen/cuda/CublasHandlePool.cpp",
        ),
        ("autocast's weight copies", "16 bit, of trained weights", sizes.weight_copies, "autocast_mode.cpp"),
        (
            "CUDA context (not in the sums)",
            "driver and kernels",
            hardware.calibration.cuda_context_bytes,
            "harness/hardware/hardware.py",
        ),
        ("host memory", "what is offloaded or paged", sizes.host_bytes, "recipe: offload"),
    ]
    for name, formula, size, source in rows:
        if size:
            yield Term("Other", name, formula, size, source)


def _lines(memory: Memory) -> Iterator[str]:
    section = ""
    for term in derive_terms(memory):
        if term.section != section:
            section = term.section
            yield ""
            yield f"{section:<{WIDTH - 10}} {'GiB':>9}"
        *above, head = _folded(f"  {term.name}: {term.formula}", WIDTH - 10)
        yield from above
        yield f"{head:<{WIDTH - 10}} {term.size_bytes / GIB:9.3f}"
        yield from _folded(f"      by: {term.source}", WIDTH)


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="      ", break_on_hyphens=False)


def _phases(memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    parts = [*_PARTS]
    if sizes.units:  # the inputs of a micro batch are small beside a whole unit
        parts = ["parameters", "gathered_parameters", *(part for part in _PARTS[1:] if part != "inputs")]
    yield ""
    yield f"{'Memory by phase, GiB':<20}" + "".join(f"{_SHORT.get(part, part):>7}" for part in ("total", *parts))
    rows: dict[str, Moment] = {}
    for moment in memory.moments:
        if moment.phase not in rows or moment.total_bytes > rows[moment.phase].total_bytes:
            rows[moment.phase] = moment
    for row in rows.values():
        numbers = (size / GIB for size in (row.total_bytes, *(getattr(row, part) for part in parts)))
        yield f"  {_title(row.phase):<18}" + "".join(f"{_short_number(size):>7}" for size in numbers)
        marker = "the peak: " if row is memory.peak else ""
        yield from _folded(f"      {marker}{row.where}", WIDTH)
    needed, available = required_bytes(memory), sizes.hardware.memory_bytes
    context = sizes.hardware.calibration.cuda_context_bytes
    verdict = "fits" if needed <= available else "DOES NOT FIT (see `harness fit`)"
    yield (
        f"  peak {memory.peak.total_bytes / GIB:.2f} GiB + CUDA context {context / GIB:.2f} "
        f"= {needed / GIB:.2f} of {available / GIB:.2f} GiB: {verdict}"
    )
    yield "  About right: `harness simulate` tells to the byte, and what the allocator reserves."


def _short_number(number: float) -> str:
    """At most six characters up to a million."""
    return f"{number:.3f}" if number < 10 else f"{number:.2f}" if number < 1000 else f"{number:.0f}"


def _title(phase: str) -> str:
    return {"setup": "after setup", "optimizer_step": "optimizer step"}.get(phase, phase)


def _timing(memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    timing, hardware, dtype = Timing(sizes), sizes.hardware, sizes.recipe.compute_dtype
    yield ""
    columns = ("ms", "TFLOP", "GB", "compute", "memory", "launch", "link")
    yield f"{'Time by phase, ms':<17}" + "".join(f"{column:>8}" for column in columns) + " waits"
    for phase in timing.phases.values():
        link = phase.transfer_s + phase.waited_s + phase.host_step_s + phase.sent_s
        seconds = (phase.time.compute_s, phase.time.memory_s, phase.time.host_s, link)
        numbers = [phase.seconds * 1e3, phase.flops / 1e12, phase.bytes_moved / 1e9, *(s * 1e3 for s in seconds)]
        waits = "host" if phase.seconds > phase.time.device_s else phase.time.bound
        yield f"  {_title(phase.name):<15}" + "".join(f"{_short_number(n):>8}" for n in numbers) + f" {waits}"
    recomputed = timing.phases["backward"].recomputed_flops / timing.hardware_flops
    mfu, hfu = timing.utilization(timing.model_flops), timing.utilization(timing.hardware_flops)
    yield f"  step {timing.seconds * 1e3:,.1f} ms, {timing.tokens_per_s:,.0f} tokens/s"
    yield f"  MFU {mfu:.1%}, HFU {hfu:.1%} ({recomputed:.0%} of the FLOPs are recomputation)"
    yield f"  {_ADVICE[timing.bound]}"
    intensity, balance = timing.balance
    yield f"  arithmetic intensity {intensity:.0f} FLOP/byte, machine balance {balance:.0f} ({dtype})"
    if sizes.recipe.distributed:
        waited = sum(phase.exposed_s for phase in timing.phases.values())
        yield f"  of the step, {waited * 1e3:,.1f} ms wait for other ranks"
    yield f"  rates: {hardware.calibration.source}"
