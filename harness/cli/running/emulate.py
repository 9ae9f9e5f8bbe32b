"""`harness emulate`: any command on virtual GPUs. `harness checkpoint`: zeros for it to load."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.cli.terminal.lines import tell
from harness.system import quiet_libraries
from harness.units import in_gib

EXAMPLES = """
Examples:
  harness emulate --gpu rtx-4090 -- python train.py --batch-size 4
  harness emulate --gpu h100 --gpus 2 -- torchrun --nproc-per-node 2 train.py
  harness emulate --gpu h100 --world-size 512 --rank 0 -- python train.py
The exit status is the command's; 2 where no virtual GPU can be had, or the command does not exist.
"""
CHECKPOINT_EXAMPLES = """
Examples:
  harness checkpoint llama-3.1-8b --out model
  harness checkpoint my/config.json --out model
  harness emulate --gpu h100 -- python train.py --model model
"""


def emulate(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments, unchanged.")
    ],
    gpu: Annotated[str, typer.Option(help="A device of the table (`harness hardware` lists them).")],
    gpus: Annotated[int, typer.Option(help="How many of them the program sees.")] = 1,
    world_size: Annotated[
        int | None,
        typer.Option(help="Run one rank alone, of so many processes; the others are answered for."),
    ] = None,
    rank: Annotated[int, typer.Option(help="With --world-size: which one.")] = 0,
    routing: Annotated[
        Literal["balanced", "worst"],
        typer.Option(help="Mixtures of experts: the same number of tokens to each, or all to the first."),
    ] = "balanced",
    values: Annotated[
        bool, typer.Option(help="Keep the values of the host's data, and compute integers truly.")
    ] = True,
    late: Annotated[
        bool,
        typer.Option(
            help="The device is as slow as can be: what it does is done when the program has waited for it. "
            "Without it, at once. Memory that streams share is free again that late."
        ),
    ] = False,
    by_clock: Annotated[
        bool,
        typer.Option(
            "--by-clock",
            help="What the device does is done when its clock says so, instead of at once. Memory that "
            "streams share then depends on how fast this machine is.",
        ),
    ] = False,
    clock: Annotated[
        bool,
        typer.Option(help="Estimate times: events and torch.profiler show them, and at the end a step's."),
    ] = True,
    real_time: Annotated[
        bool,
        typer.Option(
            "--real-time",
            help="Who waits for the device waits as long as it takes, so that time.time() shows it too. "
            "Without it, only the device's clock goes on. While torch.profiler records it is always so.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the allocator's statistics and history of every process.")
    ] = None,
) -> None:
    """Run any command on virtual GPUs: PyTorch says what memory it needs, time is estimated, and nothing is
    computed."""
    from harness.virtual_gpu import Options
    from harness.virtual_gpu import emulate as become

    become(
        command,
        Options(
            gpu,
            gpus,
            values=values,
            routing=routing,
            out=out,
            world_size=world_size,
            rank=rank,
            late=late,
            by_clock=by_clock,
            clock=clock,
            real_time=real_time,
        ),
    )


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
    from harness.zeros import write_checkpoint

    quiet_libraries()
    size_bytes, stands_in = write_checkpoint(find_config(config), out)
    tell(f"{out}: {in_gib(size_bytes)} of zeros, which take no place on the disk.")
    if stands_in:
        tell("There was no tokenizer beside the config: one with a token for each byte stands in for it.")
