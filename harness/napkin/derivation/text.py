"""The derivation for people: plain text, one line a term, then memory and time by phase, and the verdict."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from harness.hardware import arithmetic_intensity, machine_balance
from harness.napkin.derivation.activations import derive_terms
from harness.napkin.derivation.model_states import Term
from harness.napkin.memory.moments import Memory, Moment, required_bytes
from harness.napkin.model.weights import surprises
from harness.napkin.ranks.parts import described_mesh
from harness.napkin.ranks.traffic import engine_link, layer_link
from harness.napkin.tape.attention import described
from harness.napkin.tape.dims import DIMS
from harness.napkin.timing import Timing

GIB = 2**30
WIDTH = 80
"""Columns. The derivation is the same text on every terminal."""
_SHOWN_DIMS = ("BSHN", "GDIV")
_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries", "inputs", "other")
_OF_A_RANK = (
    *("parameters", "gathered_parameters", "gradients", "optimizer_state"),
    *("activations", "temporaries", "other"),
)
"""The inputs of a micro batch are small beside a whole unit."""
_ADVICE = {
    "compute": "compute bound: faster matrix units or fewer FLOPs would help",
    "memory": "memory bound: a larger micro batch, fused kernels or more bandwidth would help",
    "host": "host bound: the GPU waits for the host or its link; a larger micro batch would help",
}


def render(name: str, memory: Memory) -> str:
    """The whole derivation of `memory`, ending with a newline."""
    lines = [*_heading(name, memory), *_terms(memory), *_phases(memory), *_timing(memory), *_warnings(memory)]
    return "\n".join(lines) + "\n"


def _heading(name: str, memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    tape, shape = sizes.stages.loss.tape, sizes.built.shape
    model = f"{sizes.recipe.model}, {shape.layers} {shape.family} layers"
    yield f"{name} on {sizes.hardware.datasheet.title}: {model}"
    if sizes.recipe.distributed:
        yield f"  {described_mesh(sizes.recipe)}; what follows is one rank's"
    for letters in _SHOWN_DIMS:
        yield from _folded(
            "  " + ", ".join(f"{d} = {tape.sizes[d]:,} ({DIMS[d].meaning})" for d in letters), WIDTH
        )
    yield "  " + described(sizes.built, sizes.stages.blocks[0].tape.attention_kernel)


def _terms(memory: Memory) -> Iterator[str]:
    section = ""
    for term in derive_terms(memory):
        if term.section != section:
            section = term.section
            yield ""
            yield f"{section:<{WIDTH - 10}} {'GiB':>9}"
        yield from _term(term)


def _term(term: Term) -> Iterator[str]:
    """Name, formula and size; under them where the formula is from."""
    *above, head = _folded(f"  {term.name}: {term.formula}", WIDTH - 10)
    yield from above
    yield f"{head:<{WIDTH - 10}} {term.size_bytes / GIB:9.3f}"
    yield from _folded(f"      by: {term.source}", WIDTH)


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="      ", break_on_hyphens=False)


def _phases(memory: Memory) -> Iterator[str]:
    yield ""
    parts = _OF_A_RANK if memory.sizes.units else _PARTS
    yield f"{'Memory by phase, GiB':<20}" + "".join(f"{_short(part):>7}" for part in ("total", *parts))
    rows: dict[str, Moment] = {}
    for moment in memory.moments:
        if moment.phase not in rows or moment.total_bytes > rows[moment.phase].total_bytes:
            rows[moment.phase] = moment
    for row in rows.values():
        sizes_in_gib = (size / GIB for size in (row.total_bytes, *(getattr(row, part) for part in parts)))
        yield f"  {_phase_title(row.phase):<18}" + "".join(
            f"{_short_number(size):>7}" for size in sizes_in_gib
        )
        marker = "the peak: " if row is memory.peak else ""
        yield from _folded(f"      {marker}{row.where}", WIDTH)
    sizes = memory.sizes
    needed, available = required_bytes(memory), sizes.hardware.memory_bytes
    context = sizes.hardware.calibration.cuda_context_bytes
    verdict = "fits" if needed <= available else "DOES NOT FIT (see `harness fit`)"
    yield (
        f"  peak {memory.peak.total_bytes / GIB:.2f} GiB + CUDA context {context / GIB:.2f} "
        f"= {needed / GIB:.2f} of {available / GIB:.2f} GiB: {verdict}"
    )
    yield "  The allocator reserves some percent more: `harness simulate` tells how much."


def _warnings(memory: Memory) -> Iterator[str]:
    for warning in surprises(memory.sizes.built):
        yield ""
        yield from _folded(f"warning: {warning}", WIDTH)


def _short(part: str) -> str:
    return {
        "parameters": "params",
        "gathered_parameters": "gather.",
        "gradients": "grads",
        "optimizer_state": "optim.",
        "activations": "kept",
        "temporaries": "temps",
    }.get(part, part)


def _short_number(number: float) -> str:
    """At most six characters up to a million."""
    return f"{number:.3f}" if number < 10 else f"{number:.2f}" if number < 1000 else f"{number:.0f}"


def _phase_title(phase: str) -> str:
    return {"setup": "after setup", "optimizer_step": "optimizer step"}.get(phase, phase)


def _timing(memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    timing, hardware, dtype = Timing(sizes), sizes.hardware, sizes.recipe.compute_dtype
    yield ""
    columns = ("ms", "TFLOP", "GB", "compute", "memory", "launch", "link")
    yield f"{'Time by phase, ms':<17}" + "".join(f"{column:>8}" for column in columns) + " waits"
    for phase in timing.phases.values():
        link = (phase.transfer_s + phase.waited_s + phase.host_step_s + phase.sent_s) * 1e3
        numbers = [
            phase.seconds * 1e3,
            phase.flops / 1e12,
            phase.bytes_moved / 1e9,
            phase.time.compute_s * 1e3,
            phase.time.memory_s * 1e3,
            phase.time.host_s * 1e3,
            link,
        ]
        waits = "host" if phase.seconds > phase.time.device_s else phase.time.bound
        title = _phase_title(phase.name)
        yield f"  {title:<15}" + "".join(f"{_short_number(number):>8}" for number in numbers) + f" {waits}"
    recomputed = timing.phases["backward"].recomputed_flops / timing.hardware_flops
    mfu, hfu = timing.utilization(timing.model_flops), timing.utilization(timing.hardware_flops)
    yield f"  step {timing.seconds * 1e3:,.1f} ms, {timing.tokens_per_s:,.0f} tokens/s"
    yield f"  MFU {mfu:.1%}, HFU {hfu:.1%} ({recomputed:.0%} of the FLOPs are recomputation)"
    intensity, balance = arithmetic_intensity(timing.works), machine_balance(hardware, dtype)
    yield f"  {_ADVICE[timing.bound]}"
    yield f"  arithmetic intensity {intensity:.0f} FLOP/byte, machine balance {balance:.0f} ({dtype})"
    waited = sum(phase.exposed_s for phase in timing.phases.values())
    if sizes.recipe.distributed:
        links = [layer_link(sizes)] if sizes.built.tp > 1 else []
        links += [engine_link(sizes)] if not links or sizes.recipe.fsdp else []
        rates = " and ".join(f"{link / 1e9:.3g}" for link in dict.fromkeys(links))
        yield f"  of the step, {waited * 1e3:,.1f} ms wait for other ranks, at {rates} GB/s"
    yield f"  rates: {hardware.calibration.source}"
