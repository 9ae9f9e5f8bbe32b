"""`harness checkpoint`: a model's folder whose weights are zeros, for programs that load one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  harness checkpoint llama-3.1-8b --out model

  harness checkpoint my/config.json --out model

  harness emulate --gpu h100 -- python train.py --model model
"""


def checkpoint(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A name in recipes/models, a config.json, a folder that has one, or a Hugging Face id.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write, which is new or empty.")],
) -> None:
    """Write a checkpoint of zeros: the names, shapes and dtype of the real one, and no place on the disk.

    Its tokenizer is what lies beside the config, or one with a token for each byte. Nothing is downloaded but
    a config. For programs on a virtual GPU, where the values of weights do not matter.
    """
    from harness.architecture import find_config
    from harness.cli.terminal.lines import tell
    from harness.system import quiet_libraries
    from harness.units import in_gib
    from harness.zeros import write_checkpoint

    quiet_libraries()
    size_bytes, stands_in = write_checkpoint(find_config(config), out)
    tell(f"{out}: {in_gib(size_bytes)} of zeros, which take no place on the disk.")
    if stands_in:
        tell("There was no tokenizer beside the config: one with a token for each byte stands in for it.")
