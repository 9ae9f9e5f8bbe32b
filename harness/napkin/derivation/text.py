"""The derivation for people: plain text, one line a term, then memory and time by phase, and the verdict."""

from __future__ import annotations

from collections.abc import Iterator

from harness.hardware import arithmetic_intensity, machine_balance
from harness.napkin.derivation.activations import derive_terms
from harness.napkin.derivation.model_states import Term
from harness.napkin.memory.moments import Memory, Moment, required_bytes
from harness.napkin.tape.attention import described
from harness.napkin.tape.dims import DIMS
from harness.napkin.timing import Timing

GIB = 2**30
_SHOWN_DIMS = ("BSHN", "GDIV")
_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "temporaries", "inputs", "other")
_ADVICE = {
    "compute": "compute bound: faster matrix units or fewer FLOPs would help",
    "memory": "memory bound: a larger micro batch, fused kernels or more bandwidth would help",
    "host": "host bound: the GPU waits for the host or its link; a larger micro batch would help",
}


def render(name: str, memory: Memory) -> str:
    """The whole derivation of `memory`, ending with a newline."""
    lines = [*_heading(name, memory), *_terms(memory), *_phases(memory), *_timing(memory)]
    return "\n".join(lines) + "\n"


def _heading(name: str, memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    tape, shape = sizes.stages.loss.tape, sizes.built.shape
    model = f"{sizes.recipe.model}, {shape.layers} {shape.family} layers"
    yield f"{name} on {sizes.hardware.datasheet.title}: {model}"
    for letters in _SHOWN_DIMS:
        yield "  " + ", ".join(f"{d} = {tape.sizes[d]:,} ({DIMS[d].meaning})" for d in letters)
    yield "  " + described(sizes.built, sizes.stages.blocks[0].tape.attention_kernel)


def _terms(memory: Memory) -> Iterator[str]:
    section = ""
    for term in derive_terms(memory):
        if term.section != section:
            section = term.section
            yield ""
            yield f"{section:<90} {'GiB':>9}"
        yield from _term(term)


def _term(term: Term) -> Iterator[str]:
    head = f"  {term.name}: {term.formula}"
    while len(head) > 90:
        cut = head.rfind(" ", 0, 90)
        cut = 90 if cut < 20 else cut
        yield head[:cut]
        head = "      " + head[cut:].strip()
    yield f"{head:<90} {term.size_bytes / GIB:9.3f}  {term.source}"


def _phases(memory: Memory) -> Iterator[str]:
    yield ""
    yield f"{'Memory by phase, GiB':<46} {'total':>8} " + " ".join(f"{_short(part):>9}" for part in _PARTS)
    rows: dict[str, Moment] = {}
    for moment in memory.moments:
        if moment.phase not in rows or moment.total_bytes > rows[moment.phase].total_bytes:
            rows[moment.phase] = moment
    for row in rows.values():
        marker = " <- peak" if row is memory.peak else ""
        place = f"  {_phase_title(row.phase)} ({row.where})"[:46]
        parts = " ".join(f"{getattr(row, part) / GIB:9.3f}" for part in _PARTS)
        yield f"{place:<46} {row.total_bytes / GIB:8.3f} {parts}{marker}"
    sizes = memory.sizes
    needed, available = required_bytes(memory), sizes.hardware.memory_bytes
    context = sizes.hardware.calibration.cuda_context_bytes
    verdict = "fits" if needed <= available else "DOES NOT FIT (see `harness fit`)"
    yield (
        f"  peak {memory.peak.total_bytes / GIB:.2f} GiB + CUDA context {context / GIB:.2f} "
        f"= {needed / GIB:.2f} of {available / GIB:.2f} GiB: {verdict}"
    )
    yield "  (the allocator reserves some percent more than the peak: `harness simulate` knows how much)"


def _short(part: str) -> str:
    return {
        "parameters": "params",
        "optimizer_state": "optimizer",
        "activations": "kept",
        "temporaries": "temps",
    }.get(part, part)


def _phase_title(phase: str) -> str:
    return {"setup": "after setup", "optimizer_step": "optimizer step"}.get(phase, phase)


def _timing(memory: Memory) -> Iterator[str]:
    sizes = memory.sizes
    timing, hardware, dtype = Timing(sizes), sizes.hardware, sizes.recipe.compute_dtype
    yield ""
    columns = ("ms", "TFLOP", "GB moved", "compute ms", "memory ms", "launch ms", "link ms")
    yield f"{'Time by phase':<20}" + "".join(f"{column:>11}" for column in columns) + "  waits for"
    for phase in timing.phases.values():
        link = (phase.transfer_s + phase.waited_s + phase.host_step_s) * 1e3
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
        yield f"  {title:<18}" + "".join(f"{number:11.2f}" for number in numbers) + f"  {waits}"
    recomputed = timing.phases["backward"].recomputed_flops / timing.hardware_flops
    mfu, hfu = timing.utilization(timing.model_flops), timing.utilization(timing.hardware_flops)
    yield (
        f"  step {timing.seconds * 1e3:,.1f} ms, {timing.tokens_per_s:,.0f} tokens/s, MFU {mfu:.1%}, "
        f"HFU {hfu:.1%} ({recomputed:.0%} of the FLOPs are recomputation)"
    )
    intensity, balance = arithmetic_intensity(timing.works), machine_balance(hardware, dtype)
    yield (
        f"  {_ADVICE[timing.bound]}. Arithmetic intensity {intensity:.0f} FLOP/byte, "
        f"machine balance {balance:.0f} ({dtype})."
    )
    yield f"  rates: {hardware.calibration.source}"
