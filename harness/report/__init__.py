"""Reports: one self-contained HTML page, Markdown, CSV and pictures of runs, profiles and snapshots.

`read_run` reads, `write_report` writes the page; `render_page` is for pages that should look the same.
Imports no torch.
"""

from harness.report.differences import report_tables
from harness.report.page import render_page
from harness.report.run import ReportRun, read_run
from harness.report.table import Cell, Table, to_csv, to_markdown
from harness.report.write import write_report

__all__ = [
    "Cell",
    "ReportRun",
    "Table",
    "read_run",
    "render_page",
    "report_tables",
    "to_csv",
    "to_markdown",
    "write_report",
]
