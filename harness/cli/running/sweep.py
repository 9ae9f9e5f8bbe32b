"""`harness sweep`."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.arguments import AsJson, RecipeName, Track, one_of
from harness.cli.exit_status import A_CELL_FAILED, INTERRUPTED
from harness.cli.terminal.terminal import Terminal, say
from harness.errors import InputError
from harness.system import complain, quiet_libraries, stdout_kept_for_json, write_whole

if TYPE_CHECKING:
    from harness.sweep import Plan, Row, Sweep


EXAMPLES = """
Examples:
  harness sweep llama-3.1-8b-lora micro_batch_size=1,2,4,8,16
  harness sweep llama-3.1-8b-lora gradient_checkpointing=true,false offload=none,activations+optimizer
  harness sweep mistral-7b-qlora seq_len=1024,2048,4096 micro_batch_size=1,2,4 --grid --napkin
  harness sweep smoke micro_batch_size=1,2,4 steps=3 --measure
  harness sweep llama-3.1-8b-lora seq_len=1024,2048 --measure --launcher submitit \
--launcher-option slurm_partition=gpu
Values are separated by commas; several names of offload or lora_targets are joined by a plus sign. A field \
with one value changes the base recipe. hardware=h100,l4 compares devices of the table.
The sweep leaves sweep.json, sweep.csv, sweep.md, report.html and a file for every cell. What is done is not \
done again: run the same command to go on after Ctrl-C.
Exit status: 0 also when cells ran out of memory or were refused, 1 when a cell crashed, 2 for bad input, \
130 after Ctrl-C.
"""


def sweep(
    recipe: RecipeName,
    values: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=V1,V2,...]... [hardware=NAME]",
            help="What to change: every value is a cell of the table.",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run every cell on this machine, each in a process of its own.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate every cell (this is the default).")
    ] = False,
    napkin: Annotated[bool, typer.Option("--napkin", help="Closed form: milliseconds a cell.")] = False,
    grid: Annotated[
        bool, typer.Option("--grid", help="Every combination. Default: one field at a time from the base.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cells at the same time. Default: simulations, half the processors; measurements, 1; with "
            "--launcher 100, for the engine to queue.",
        ),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="submitit|ray",
            help="Start the cells elsewhere: as SLURM jobs (submitit), or on a Ray cluster.",
        ),
    ] = None,
    launcher_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="For the engine, as it names it: slurm_partition=gpu, timeout_min=120, num_cpus=4.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep. Default: profiles/sweeps/<recipe>-<kind>-<fields>-<digest>."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="With --measure: cuda, cuda:1, ... or cpu.")] = None,
    track: Track = None,
    png: Annotated[bool, typer.Option("--png", help="Also leave a picture of every field.")] = False,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV on stdout instead of text.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown on stdout instead of text.")
    ] = False,
) -> None:
    """Change one field at a time, or all combinations: a table, curves, and the answer in a sentence."""
    from harness.cli.terminal.sweep import SweepProgress, print_sweep
    from harness.sweep import default_folder, plan_sweep, run_cells, sole_sweep_in, sweep_of
    from harness.track import tracker_names

    trackers = tracker_names(track or [])
    quiet_libraries()  # here, so that the cells' processes begin with it
    kind = one_of({"--measure": measure, "--simulate": simulate, "--napkin": napkin}) or "--simulate"
    form = one_of({"--json": as_json, "--csv": as_csv, "--markdown": as_markdown})
    if measure and (jobs or 1) > 1 and launcher is None:
        raise InputError(
            "--jobs: cells that are measured at the same time disturb each other. Leave --jobs out."
        )
    if device is not None and not measure:
        raise InputError("--device is for --measure; a prediction is for hardware=NAME.")
    sources = {"--measure": "measured", "--simulate": "simulated", "--napkin": "napkin"}
    if png:
        from harness.report import drawing

        drawing()  # raises without matplotlib, now and not after the last cell
    if launcher_option and launcher is None:
        raise InputError("--launcher-option is for --launcher submitit or ray.")
    plan = plan_sweep(recipe, values or [], sources[kind], grid=grid)  # type: ignore[arg-type]
    folder = out or default_folder(plan)
    log, people = Terminal(stderr=True), Terminal(stderr=form is not None)
    told = partial(say, log, whole=True)
    at_once = 1 if measure else jobs or max(1, (os.cpu_count() or 2) // 2)
    remote = None
    if launcher is not None:
        from harness.sweep import launcher_named

        if measure and device is None:
            device = "cuda"  # a machine without one refuses its cells
        remote = launcher_named(launcher, launcher_option or [], folder, plan.kind, device, told)
        at_once = jobs or (1 if device == "cpu" else remote.at_once)
    rows: list[Row] = []
    interrupted = False
    with sole_sweep_in(folder):
        _refuse_another_question(folder, plan)
        try:
            kept = stdout_kept_for_json(form is not None or remote is not None)  # launchers print to it
            cells = run_cells(plan, folder, at_once, device, remote, told)
            with kept, SweepProgress(log, len(plan.cells)) as progress, closing(cells):
                for row in cells:
                    rows.append(row)
                    progress.done(row)
        except KeyboardInterrupt:
            interrupted = True
        place = {id(cell): n for n, cell in enumerate(plan.cells)}
        rows.sort(key=lambda row: place[id(row.cell)])
        if rows:
            done = sweep_of(plan, rows)
            written = _write(folder, done)
            if png:
                from harness.sweep import write_figures

                write_figures(done, folder)
            print_sweep(people, done)
            if form is not None:
                print(written[form], end="")
            say(people, f"sweep folder: {folder}", whole=True)
            if trackers:
                from harness.sweep import tracked_cells
                from harness.track import track_all

                files = [folder / name for name in ("report.html", "sweep.json", "sweep.csv")]
                track_all(trackers, tracked_cells(plan, rows, folder, files), told)
    if interrupted:
        rest = f"{len(rows)} of {len(plan.cells)} cells are done; run the same command to go on"
        raise typer.Exit(complain(f"interrupted: {rest}", INTERRUPTED))
    failed = [row for row in rows if row.outcome.status == "failed"]
    if failed:
        where = f"the file of each in {folder / 'cells'} says where"
        raise typer.Exit(complain(f"{len(failed)} of {len(rows)} cells failed; {where}", A_CELL_FAILED))


def _refuse_another_question(folder: Path, plan: Plan) -> None:
    """Raise InputError when `folder` has the tables of another sweep, which would be overwritten."""
    from harness.sweep import Sweep

    try:
        earlier = Sweep.read(folder / "sweep.json")
    except InputError:  # there is none, or none that can be read
        return
    question_of = attrgetter("kind", "base", "hardware", "grid")
    if question_of(earlier) != question_of(plan) or list(earlier.axes) != list(plan.axes):
        raise InputError(
            f"--out {folder}: it has a {earlier.kind} sweep of {earlier.name} over "
            f"{', '.join(earlier.axes)}, another question than this one. Give another folder."
        )


def _write(folder: Path, done: Sweep) -> dict[str, str]:
    """Write the files of the sweep. Returns their contents by the option that prints them."""
    from harness.sweep import as_csv, as_markdown, sweep_html

    contents = {"--json": done.to_json(), "--csv": as_csv(done), "--markdown": as_markdown(done)}
    for option, name in (("--json", "sweep.json"), ("--csv", "sweep.csv"), ("--markdown", "sweep.md")):
        write_whole(folder / name, contents[option])
    write_whole(folder / "report.html", sweep_html(done))
    return contents
