"""`harness shard`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import tell

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
    from harness.fit import divisions
    from harness.system import quiet_libraries, stdout_kept_for_json

    name, loaded, device = asked_for(recipe, overrides, memory)
    told: list[str] = []

    def on_stderr(line: str) -> None:
        told.append(line)
        tell(line, stderr=True)

    with stdout_kept_for_json(as_json):
        quiet_libraries()
        found = divisions(name, loaded, device, gpus, group, on_stderr)
    if as_json:
        print(json.dumps(found.as_json()["strategies"], indent=1))
    else:
        tell(str(found))
    for warning in (f"warning: {warning}" for warning in found.warnings):
        if warning not in told:
            tell(warning, stderr=as_json)
