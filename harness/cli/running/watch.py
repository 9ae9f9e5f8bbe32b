"""`harness watch`: any training command, recorded as `harness run` records a recipe."""

import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from harness.cli.arguments import Track
from harness.cli.terminal.profile_tables import print_profile
from harness.cli.terminal.terminal import Terminal, say
from harness.errors import InputError
from harness.step_profile import StepProfile, explain_oom
from harness.system import complain

EXAMPLES = """
Examples:
  harness watch -- python train.py --batch-size 4
  harness watch --gpu rtx-4090 -- python train.py
  harness watch --steps 10-12 --out here -- torchrun --nproc-per-node 2 train.py
  harness watch --gpu rtx-4090,h100 --fit BS=1..64 -- python train.py
The exit status is the command's; 128 + the signal that ended it; 2 for bad input. With --fit or several \
devices: 0, or 3 where one of them does not hold it, even with the least.
"""
NOTHING_RECORDED = (
    "nothing was recorded. Where no process has said why: looked for steps in every Python process of the "
    "command, by calls of torch.nn.Module with gradients, Tensor.backward or torch.autograd.backward, and "
    "torch.optim.Optimizer.step, which ends a step. Other optimizers: harness.watch in the program."
)


def watch(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="The program and its arguments, unchanged.")
    ],
    steps: Annotated[
        str, typer.Option(help="The steps whose memory is recorded, counted from 1: 3-5, or one number.")
    ] = "3-5",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The run folder, with a folder a rank under torchrun. "
            "Default: profiles/runs/<program>-<time>."
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Run on a virtual GPU, a device of the table, where no GPU is; or on several, one after the "
            "other: a100-80gb,h100."
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="With --gpu: how many the program sees.")] = 1,
    track: Track = None,
    fit: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=LEAST..MOST",
            help="Find the largest value that does not run out of memory, in a few runs: of an environment "
            "variable that the program reads, or in the place of {NAME} or {} in the command.",
        ),
    ] = None,
) -> None:
    """Run any training command and record where its bytes and milliseconds go."""
    from harness.cli.running.watch_fit import watch_and_fit
    from harness.run_folder import new_path, without_secrets
    from harness.track import track_run, tracker_names
    from harness.virtual_gpu import Options
    from harness.watching import parse_steps, parse_values, run_watched

    script = next((word for word in command if word.endswith(".py")), command[0] if command else "watch")
    name, people, trackers = Path(script).stem, Terminal(stderr=True), tracker_names(track or [])
    folder, recorded = out or new_path(name), parse_steps(steps)
    devices = [None] if gpu is None else [Options(each.strip(), gpus) for each in gpu.split(",")]
    if fit is not None or len(devices) > 1:
        if trackers:
            raise InputError("--track tells one run of a program: leave it out with --fit and several --gpu.")
        values = None if fit is None else parse_values(fit)
        raise typer.Exit(watch_and_fit(people, command, recorded, folder, devices, values))
    about = {"command": shlex.join(without_secrets(command))}
    status = run_watched(command, recorded, folder, devices[0])
    if _show(people, folder, status, gpu):
        say(people, f"run folder: {folder}", whole=True)
        track_run(trackers, folder, name, about, partial(say, people, whole=True))
    else:
        ended = f"nothing was recorded, and the command ended with status {status}."
        complain(ended if status else NOTHING_RECORDED, 1)
        with suppress(OSError):
            folder.rmdir()  # if it is empty
    raise typer.Exit(status)


def _show(people: Console, folder: Path, status: int, gpu: str | None) -> bool:
    """Print the tables of the run, or those of every process that has a folder of its own. Returns whether
    there was any profile."""
    from harness.cli.terminal.peak import print_verdict
    from harness.run_folder import folder_of_rank

    shown = [folder, *sorted(folder.glob("process-*"))]
    paths = [path / "profile.json" for path in shown if (path / "profile.json").is_file()]
    profiles = [StepProfile.read(path) for path in paths]
    for path, profile in zip(paths, profiles, strict=True):
        say(people, f"{profile.subject} on {profile.hardware.name}")
        print_profile(people, profile)
        if profile.oom is not None:
            say(people, explain_oom(profile))
        print_verdict(people, "the program" if profile.ranks is None else "the rank that peaks", profile)
        if status > 128 and not profile.complete:
            own = folder_of_rank(folder, profile.ranks.peak_rank) if profile.ranks else path.parent
            with (own / "log.jsonl").open("rb") as log:
                step = sum(1 for _ in log) + 1
            ended = f"the command was ended by signal {status - 128} in step {step}"
            complain(f"{ended}; the profile so far is marked incomplete", 1)
    if gpu is not None and profiles and all(profile.source != "emulated" for profile in profiles):
        complain(
            f"no step used the virtual {gpu}: the program trained on the CPU. If it can choose its "
            "device, choose cuda.",
            1,
        )
    return bool(profiles)
