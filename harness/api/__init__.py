"""The questions of the command line, asked in Python: what `import harness` offers.

Each function imports what it needs when it is called. Imports no torch.
"""
# pyright: reportUnusedImport=false

from harness.api.estimates import napkin, simulate
from harness.api.fitting import FitAnswer, fit, formula, shard
from harness.api.loading import load_profile, load_recipe, load_snapshot
from harness.api.measuring import run
from harness.api.reporting import Report, read_runs, report
