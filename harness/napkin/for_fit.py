"""For harness/fit alone, until it searches with the derived formula: what it asked of the napkin before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from harness.napkin.ranks import sent_bytes

BUCKET = 25 * 2**20


class ForFit:
    """More attributes of Sizes."""

    @property
    def buckets(self: Any) -> list[int]:
        """DDP's, of 25 MiB."""
        return [BUCKET] * (self.bucket_bytes // BUCKET) + [self.bucket_bytes % BUCKET] * self.recipe.ddp

    @property
    def stages(self: Any) -> SimpleNamespace:
        """With the residual stream that enters the loss."""
        return SimpleNamespace(loss=SimpleNamespace(entering=self.activations.block_input))


def traffic(sizes: Any) -> dict[str, list[SimpleNamespace]]:
    """By phase what a rank sends."""
    found = sent_bytes(sizes.built, sizes.units, sizes.bucket_bytes)
    return {phase: [SimpleNamespace(sent=size)] for phase, (_, size) in found.items()}
