"""Pages, Markdown, CSV and pictures of runs, profiles and snapshots.

`read_run` reads a run, `write_report` writes the page of several, and `render_page` makes other pages of the
same look. Imports no torch.
"""
# pyright: reportUnusedImport=false

from harness.report.differences import report_tables
from harness.report.figures import COLOURS, drawing, stacked, write_figures
from harness.report.page import render_page, report_html, write_report
from harness.report.run import ReportRun, read_run
from harness.report.sections import Section, section_of
from harness.report.table import Cell, Table, escape_markdown, markdown_of, no_formula, to_csv, to_markdown
