"""`harness napkin`."""

from __future__ import annotations

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import tell

EXAMPLES = """
Examples:

  harness napkin llama-3.1-8b-lora

  harness napkin mistral-7b-qlora micro_batch_size=4 hardware=rtx-4090 --json
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
