"""Asks about many recipes: their answers in one table, as curves and on a page. Each cell has a process of
its own, here or on another machine."""
# pyright: reportUnusedImport=false

from harness.sweep.document import Sweep, sweep_of
from harness.sweep.figures import write_figures
from harness.sweep.folder import default_folder, sole_sweep_in
from harness.sweep.launchers import RemoteLauncher, launcher_named
from harness.sweep.page import sweep_html
from harness.sweep.plan import Plan, plan_sweep
from harness.sweep.processes import Row, run_cells, tracked_cells
from harness.sweep.table import as_csv, as_markdown, table_of
