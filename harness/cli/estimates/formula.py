"""`harness formula`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import tell
from harness.units import in_gib

if TYPE_CHECKING:
    from harness.fit import DerivedFormula

EXAMPLES = """
Examples:

  harness formula llama-3.1-8b-lora micro_batch_size=4

  harness formula mistral-7b-qlora micro_batch_size=2 seq_len=4096 hardware=rtx-4090 --json
"""
SHOWN = 24
"""Terms that are printed one by one; the rest are one line."""


def formula(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    memory: MemorySize = None,
    as_json: AsJson = False,
) -> None:
    """The simulated peak as a sum of terms in batch and sequence, exact in the range that it states."""
    from harness.fit import derive
    from harness.system import quiet_libraries, stdout_kept_for_json

    name, loaded, device = asked_for(recipe, overrides, memory)
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        found = derive(loaded, device)
    if as_json:
        print(json.dumps(document(found), indent=1))
    else:
        tell("\n".join(lines(name, found)))


def document(found: DerivedFormula) -> dict[str, Any]:
    """The formula as plain data."""
    terms = [
        {**asdict(term), "size": str(term.size), "size_in_dimensions": found.spelled(term.size)}
        for term in found.terms.terms
    ]
    return {
        "micro_batch_size": found.point.micro_batch_size,
        "seq_len": found.point.seq_len,
        "simulated_at": [list(point) for point in found.piece.points],
        "exact": found.exact,
        "range": found.range,
        "peak_phase": found.terms.phase,
        "peak_allocated_bytes": found.terms.total_bytes,
        "dimensions": found.dimensions,
        "terms": terms,
    }


def lines(name: str, found: DerivedFormula) -> Iterator[str]:
    """The formula for a terminal."""
    rows, tokens = found.point
    yield f"{name}: what is allocated at the peak, in {found.terms.phase}"
    yield f"  B = micro_batch_size, here {rows:,}; S = seq_len, here {tokens:,}; " + ", ".join(
        f"{letter} = {size:,}" for letter, size in found.dimensions.items()
    )
    yield ""
    shown = found.terms.terms[:SHOWN]
    for term in shown:
        size = f"{in_gib(term.rounded_bytes):>10}"
        times = f"{term.count:>5,} × " if term.count > 1 else " " * 8
        yield f"  {size} {times}{found.spelled(term.size):<24} {term.category}"
        module = term.module.removeprefix("base_model.model.")
        yield f"  {'':>10} {'':>8}{' '.join(part for part in (module, term.operator) if part)}"
    rest = found.terms.terms[SHOWN:]
    if rest:
        size, largest = (in_gib(n) for n in (sum(term.rounded_bytes for term in rest), rest[0].rounded_bytes))
        yield f"  {size:>10} {'':>8}{len(rest)} more terms, the largest {largest}"
    yield f"  {in_gib(found.terms.total_bytes):>10} {'':>8}together, in blocks of 512 bytes"
    yield ""
    yield f"  {found.range}"
