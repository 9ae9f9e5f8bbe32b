"""`harness napkin`, `harness formula` and `harness shard`: a step's memory as a sum of terms, on one device
or divided among several.
"""

from typing import Annotated

import typer

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import answer, tell
from harness.system import quiet_libraries, stdout_kept_for_json

NAPKIN_EXAMPLES = """
Examples:
  harness napkin llama-3.1-8b-lora
  harness napkin mistral-7b-qlora micro_batch_size=4 hardware=rtx-4090 --json
"""
FORMULA_EXAMPLES = """
Examples:
  harness formula llama-3.1-8b-lora micro_batch_size=4
  harness formula mistral-7b-qlora micro_batch_size=2 seq_len=4096 hardware=rtx-4090 --json
"""
SHARD_EXAMPLES = """
Examples:
  harness shard llama-3.1-8b-full-bf16 --gpus 8
  harness shard llama-3.1-70b-qlora --gpus 2 hardware=rtx-4090
  harness shard llama-3.1-8b-full-bf16 --gpus 64 parallel=fsdp reduce_dtype=fp32 wrap=accelerate
"""


def napkin(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    memory: MemorySize = None,
    as_json: AsJson = False,
) -> None:
    """Derive memory and time line by line, each line checkable by hand, in milliseconds."""
    from harness.cli.terminal.derivation import render
    from harness.napkin import estimate, profile

    name, loaded, device = asked_for(recipe, overrides, memory)
    estimated = estimate(loaded, device)
    if as_json:
        print(profile(estimated).to_json())
    else:
        tell(render(name, estimated))


def formula(
    recipe: RecipeName,
    overrides: OverridesAndHardware = None,
    memory: MemorySize = None,
    as_json: AsJson = False,
) -> None:
    """The simulated peak as a sum of terms in batch and sequence, exact in the range that it states."""
    from harness.fit import derive

    name, loaded, device = asked_for(recipe, overrides, memory)
    with stdout_kept_for_json(as_json):
        quiet_libraries()
        found = derive(loaded, device, name)
    answer(found.as_json(), str(found), as_json=as_json)


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

    name, loaded, device = asked_for(recipe, overrides, memory)
    printed: list[str] = []

    def on_stderr(line: str) -> None:
        printed.append(line)
        tell(line, stderr=True)

    with stdout_kept_for_json(as_json):
        quiet_libraries()
        found = divisions(name, loaded, device, gpus, group, on_stderr)
    answer(found.as_json()["strategies"], str(found), as_json=as_json)
    for warning in (f"warning: {warning}" for warning in found.warnings):
        if warning not in printed:
            tell(warning, stderr=as_json)
