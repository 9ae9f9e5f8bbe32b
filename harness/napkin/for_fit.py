"""For harness/fit alone, until it searches with the derived formula: what it asked of the napkin before."""

from __future__ import annotations

from dataclasses import dataclass

from harness.napkin.memory import Sizes
from harness.napkin.ranks import sent_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in one phase."""

    sent: float


def traffic(sizes: Sizes) -> dict[str, list[Traffic]]:
    """By phase what a rank sends."""
    found = sent_bytes(sizes.built, sizes.units, sizes.bucket_bytes)
    return {phase: [Traffic(size)] for phase, (_, size) in found.items()}
