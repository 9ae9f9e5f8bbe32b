"""`harness shard`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import tell
from harness.units import GIB


def shard(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 8,
    group: Annotated[int, typer.Option(help="GPUs with fast links to each other (hybrid sharding).")] = 8,
    memory: MemorySize = None,
    as_json: AsJson = False,
) -> None:
    """Divide the step among GPUs: memory and communication of each, under DDP, ZeRO, FSDP and others."""
    from harness.fit import bucket_note
    from harness.fit import shard as divide
    from harness.napkin import estimate

    name, loaded, device = asked_for(recipe, overrides, memory)
    estimated = estimate(loaded, device)
    rows = divide(estimated, gpus, group)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    sizes = estimated.sizes
    tell(f"{name} on {gpus} × {sizes.hardware.datasheet.title}: per GPU, one optimizer step")
    tell(
        f"  one GPU: parameters {sizes.parameter_bytes / GIB:.2f}, gradients "
        f"{sizes.gradient_bytes / GIB:.2f}, optimizer {sizes.device_state / GIB:.2f}, "
        f"peak {estimated.peak.total_bytes / GIB:.2f} GiB\n"
    )
    columns = f"{'params':>7} {'grads':>7} {'optim.':>7} {'peak GiB':>8} {'sent GiB':>8} {'link ms':>8}"
    tell(f"  {'strategy':<16} {columns} {'shows ms':>8}")
    overlaps: dict[str, list[str]] = {}
    for row in rows:
        overlaps.setdefault(row.overlap, []).append(row.strategy)
        states = (row.states.parameters, row.states.gradients, row.states.optimizer)
        tell(
            f"  {row.strategy:<16} "
            + " ".join(f"{size / GIB:7.3f}" for size in states)
            + f" {row.peak_bytes / GIB:8.2f} {row.sent_bytes / GIB:8.3f} {row.link_s * 1e3:8.1f} "
            f"{row.exposed_s * 1e3:8.1f}"
        )
    tell("\nshows ms: what of the link's time the step waits for")
    for overlap, names in overlaps.items():
        tell(f"  {', '.join(names)}: {overlap}")
    tell(bucket_note(rows))
