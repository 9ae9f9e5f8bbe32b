"""`harness shard`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import tell
from harness.units import GIB

if TYPE_CHECKING:
    from harness.fit import Refused, Sharded

EXAMPLES = """
Examples:

  harness shard llama-3.1-8b-full-bf16 --gpus 8

  harness shard llama-3.1-70b-qlora --gpus 2 hardware=rtx-4090

  harness shard llama-3.1-8b-full-bf16 --gpus 64 parallel=fsdp reduce_dtype=fp32 wrap=accelerate
"""


def shard(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 8,
    group: Annotated[int, typer.Option(help="GPUs with fast links to each other (hybrid sharding).")] = 8,
    memory: MemorySize = None,
    as_json: AsJson = False,
) -> None:
    """Divide the step among GPUs: memory and communication of each, under DDP, FSDP2, ZeRO and others."""
    from harness.fit import Sharded, strategies
    from harness.napkin import estimate, warnings_of
    from harness.system import quiet_libraries, stdout_kept_for_json

    name, loaded, device = asked_for(recipe, overrides, memory)
    told: list[str] = []

    def on_stderr(line: str) -> None:
        told.append(line)
        tell(line, stderr=True)

    with stdout_kept_for_json(as_json):
        quiet_libraries()
        rows = strategies(estimate(loaded, device), gpus, group, on_stderr)
    if as_json:
        print(json.dumps([asdict(row) for row in rows if isinstance(row, Sharded)], indent=1))
    else:
        tell(f"{name} on {gpus} × {device.datasheet.title}: per GPU, one optimizer step\n")
        _table(rows)
        _notes(rows, gpus)
    for warning in (f"warning: {warning}" for warning in warnings_of(loaded)):
        if warning not in told:
            tell(warning, stderr=as_json)


def _table(rows: list[Sharded | Refused]) -> None:
    from harness.fit import Sharded

    columns = f"{'params':>7} {'grads':>7} {'optim.':>7} {'peak GiB':>8} {'sent GiB':>8} {'link ms':>8}"
    tell(f"  {'strategy':<16} {columns} {'shows ms':>8}")
    for row in rows:
        if not isinstance(row, Sharded):
            tell(f"  {row.strategy:<16} not with this recipe")
            continue
        states = (row.states.parameters, row.states.gradients, row.states.optimizer)
        tell(
            f"  {row.strategy:<16} "
            + " ".join(f"{size / GIB:7.3f}" for size in states)
            + f" {row.peak_bytes / GIB:8.2f} {row.sent_bytes / GIB:8.3f} {row.link_s * 1e3:8.1f} "
            f"{row.exposed_s * 1e3:8.1f}"
        )


def _notes(rows: list[Sharded | Refused], gpus: int) -> None:
    """What the numbers rest on, and what is not in them."""
    from harness.fit import Sharded, bucket_note
    from harness.step_profile import NCCL_COMMUNICATOR

    divided = [row for row in rows if isinstance(row, Sharded)]
    overlaps: dict[str, list[str]] = {}
    for row in divided:
        overlaps.setdefault(row.overlap, []).append(row.strategy)
    tell("\nshows ms: what of the link's time the step waits for")
    for overlap, names in overlaps.items():
        tell(f"  {', '.join(names)}: {overlap}")
    simulated = [row.strategy for row in divided if row.source == "simulated"]
    if simulated:
        tell(f"simulated, peak GiB and shows ms of rank 0: {', '.join(simulated)}; all else is arithmetic")
    tell("peak GiB, as PyTorch's allocator counts it:")
    for row in divided:
        if row.where:
            tell(f"  {row.strategy} peaks {'in' if row.source == 'simulated' else 'at'}: {row.where}")
        if row.buffers:
            tell(f"  {row.strategy} holds DeepSpeed's {row.buffers}")
    if note := bucket_note(rows):
        tell(f"  {note}")
    for row in rows:
        if not isinstance(row, Sharded):
            tell(f"  {row.strategy}: {row.reason}")
        elif row.not_simulated:
            tell(f"  {row.strategy} is by arithmetic, since it cannot be simulated: {row.not_simulated}")
    if gpus > 1:
        low, high = (size / GIB for size in NCCL_COMMUNICATOR)
        tell(f"Beside it NCCL takes {low:.1f} to {high:.1f} GiB for each communicator, which no row has.")
