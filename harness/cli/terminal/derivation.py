"""What `harness napkin` prints: a line for each term, then memory and time by phase, and the verdict."""

import textwrap
from collections.abc import Iterable, Iterator

from harness.hardware import arithmetic_intensity, machine_balance
from harness.napkin import Memory, Moment, Term, derive_terms, step_time
from harness.recipe import surprises_of_mesh
from harness.step_profile import CATEGORIES
from harness.units import GIB

WIDTH = 80
"""The columns of the derivation, which is the same text on every terminal."""
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
"""The headings of columns and rows that differ from the names of categories and phases."""
_ADVICE = {
    "compute": "compute bound: faster matrix units or fewer FLOPs would help",
    "memory": "memory bound: a larger micro batch, fused kernels or more bandwidth would help",
    "host": "host bound: the GPU waits for the host or its link; a larger micro batch would help",
}
"""What would make a step faster, by what bounds its time."""


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
    for warning in (*surprises_of_mesh(memory.recipe), *memory.built.surprises):
        lines += ["", *_folded(f"warning: {warning}", WIDTH)]
    return "\n".join(lines) + "\n"


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="      ", break_on_hyphens=False)


def _heading(name: str, memory: Memory, terms: Iterable[Term]) -> Iterator[str]:
    recipe, shape, acts = memory.recipe, memory.built.shape, memory.activations
    yield f"{name} on {memory.hardware.datasheet.title}: {recipe.model}, {shape.layers} {shape.family} layers"
    if recipe.world_size > 1:
        mesh = {name: getattr(recipe, name) for name in ("dp_replicate", "dp_shard", "tp")}
        shown = " × ".join(f"{name} {size}" for name, size in mesh.items() if size > 1)
        yield f"  {recipe.world_size} ranks: {shown}; what follows is one rank's"
    used = {
        letter for term in terms for part in term.formula.split() for letter in part.strip("[").split("·")
    }
    shown = [f"{k} = {size:,} ({means})" for k, (size, means) in acts.dims.letters.items() if k in used]
    yield from _folded("  " + ", ".join(shown), WIDTH)
    yield f"  attention: {acts.asked}, kernel: {acts.kernel}"


def _phases(memory: Memory) -> Iterator[str]:
    rows = dict[str, Moment]()
    # there is room for one of the two: inputs are small beside the gathered parameters of a whole unit
    left_out = "inputs" if memory.recipe.fsdp else "gathered_parameters"
    parts = [part for part in CATEGORIES if part != left_out]
    for moment in memory.moments:
        if moment.phase not in rows or moment.total_bytes > rows[moment.phase].total_bytes:
            rows[moment.phase] = moment
    titles = "".join(f"{_SHORT.get(part, part):>7}" for part in ("total", *parts))
    yield from ("", f"{'Memory by phase, GiB':<20}{titles}")
    for row in rows.values():
        numbers = (size / GIB for size in (row.total_bytes, *(row.held[part] for part in parts)))
        yield f"  {_SHORT.get(row.phase, row.phase):<18}" + "".join(f"{_number(size):>7}" for size in numbers)
        yield from _folded(f"      {'the peak: ' if row is memory.peak else ''}{row.where}", WIDTH)
    peak, needed = memory.peak.total_bytes, memory.required_bytes
    available = memory.hardware.memory_bytes
    verdict = "fits" if needed <= available else "DOES NOT FIT (see `harness fit`)"
    sums = f"{peak / GIB:.2f} GiB + CUDA context {(needed - peak) / GIB:.2f} = {needed / GIB:.2f}"
    yield f"  peak {sums} of {available / GIB:.2f} GiB: {verdict}"
    yield "  About right: `harness simulate` tells to the byte, and what the allocator reserves."


def _number(number: float) -> str:
    """A number in at most six characters, if it is below a million."""
    return f"{number:.3f}" if number < 10 else f"{number:.2f}" if number < 1000 else f"{number:.0f}"


def _timing(memory: Memory) -> Iterator[str]:
    time, hardware, dtype = step_time(memory), memory.hardware, memory.recipe.compute_dtype
    step = time.stats
    columns = ("ms", "TFLOP", "GB", "compute", "memory", "launch", "link")
    yield from ("", f"{'Time by phase, ms':<17}" + "".join(f"{column:>8}" for column in columns) + " waits")
    for name, phase in time.phases.items():
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
    recomputed = time.recomputed_flops / time.flops
    intensity = arithmetic_intensity([work for phase in time.phases.values() for work in phase.works])
    yield f"  step {time.seconds * 1e3:,.1f} ms, {time.tokens_per_s:,.0f} tokens/s"
    shares = f"MFU {step.mfu or 0:.1%}, HFU {step.hfu or 0:.1%}"
    yield f"  {shares} ({recomputed:.0%} of the FLOPs are recomputation)"
    yield f"  {_ADVICE[step.bound or 'host']}"
    balance = machine_balance(hardware, dtype)
    yield f"  arithmetic intensity {intensity:.0f} FLOP/byte, machine balance {balance:.0f} ({dtype})"
    if memory.recipe.distributed:
        waited = sum(phase.exposed_s for phase in time.phases.values())
        yield f"  of the step, {waited * 1e3:,.1f} ms wait for other ranks"
    yield from textwrap.wrap(
        f"  rates: {hardware.calibration.source}", 98, subsequent_indent="    ", break_on_hyphens=False
    )
