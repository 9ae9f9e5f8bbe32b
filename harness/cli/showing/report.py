"""`harness report`: runs, profiles and snapshots as a page, as Markdown, CSV or pictures."""

import os
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.arguments import one_of
from harness.cli.terminal.terminal import Terminal, say
from harness.errors import InputError
from harness.system import write_whole

PAGE = "report.html"

EXAMPLES = """
Examples:
  harness report profiles/runs/smoke-20260101-120000
  harness report one-run another-run --out both.html
  harness report measured.json simulated.json --markdown
  harness report snapshot.pickle --png slides
  harness report snapshot.pickle --device 1
"""


def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_PROFILE...",
            help="Run folders, profiles, or memory snapshots (pickle or JSON). Profiles of one recipe are "
            "put side by side; several runs are compared.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write. Default: report.html in the run's folder, or here for anything else."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The tables in GitHub's Markdown, on stdout or to --out.")
    ] = False,
    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="Every number, one a line, in bytes and seconds; on stdout or to --out."),
    ] = False,
    png: Annotated[
        Path | None, typer.Option(help="Write the charts as PNG pictures into this folder.")
    ] = None,
    device: Annotated[
        int | None,
        typer.Option(
            help="Of a snapshot of several devices, the one to show. Default: one that ran out of memory, "
            "or did the most."
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate", help="Also simulate the recipe of a profile that has no simulated answer."
        ),
    ] = False,
) -> None:
    """Show what fills the memory and when, and what takes the time: one HTML file that opens offline."""
    from harness.api import read_runs
    from harness.report import report_tables, section_of, to_csv, to_markdown, write_report

    one_of({"--markdown": markdown, "--csv": as_csv, "--png": png is not None})
    if png is not None and out is not None:
        raise InputError("--png DIR names the folder of the pictures already: leave --out away.")
    runs = read_runs(paths, device=device, simulate=simulate)
    people = Terminal(stderr=True)
    if png is not None:
        from harness.report import write_figures

        written = write_figures(runs, png)
    elif markdown or as_csv:
        tables = report_tables([section_of(run) for run in runs])
        if not tables:
            raise InputError("there is nothing to tabulate in a snapshot without a recorded history.")
        text = (to_markdown if markdown else to_csv)(tables)
        if out is None:
            print(text, end="")
            return

        write_whole(out, text)
        written = [out]
    else:
        is_run = len(paths) == 1 and os.path.isdir(paths[0])
        target = out or (paths[0] / PAGE if is_run else Path(PAGE))
        write_report(runs, target)
        written = [target]
    for path in written:
        say(people, f"written: {path}", whole=True)
