"""The report of some runs as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.report.differences import difference_tables
from harness.report.page import render_page
from harness.report.run import ReportRun
from harness.report.sections import section_of
from harness.system import write_whole
from harness.units import in_gib

SCRIPTS = ("columns.js", "timeline.js", "charts.js", "stacked.js", "overlay.js", "report.js")


def report_html(runs: Sequence[ReportRun], home: str | None = None) -> str:
    """The page: what differs (with several runs), then a section a run. `home`: where it was opened from."""
    sections = [section_of(run) for run in runs]
    names = [section.name for section in sections]
    title = runs[0].title if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return render_page(
        "report.html",
        title=title,
        home=home,
        data={"runs": [section.data for section in sections]},
        scripts=SCRIPTS,
        sections=sections,
        in_gib=in_gib,
        differences=difference_tables(runs),
    )


def write_report(runs: Sequence[ReportRun], out: Path) -> None:
    """Write the page of `runs` to `out`, whole or not at all. Raises InputError and MissingDependency."""
    write_whole(out, report_html(runs))
