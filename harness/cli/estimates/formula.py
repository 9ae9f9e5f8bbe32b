"""`harness formula`."""

from __future__ import annotations

import json

from harness.cli.arguments import AsJson, MemorySize, OverridesAndHardware, RecipeName, asked_for
from harness.cli.terminal.lines import tell

EXAMPLES = """
Examples:

  harness formula llama-3.1-8b-lora micro_batch_size=4

  harness formula mistral-7b-qlora micro_batch_size=2 seq_len=4096 hardware=rtx-4090 --json
"""


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
        found = derive(loaded, device, name)
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        tell(str(found))
