"""The questions of the command line as Python functions: what `import harness` offers.

Importing it imports no torch; a function that needs torch imports it when it is called.
"""
# pyright: reportUnusedImport=false

from harness.api.estimates import napkin, simulate
from harness.api.fitting import FitAnswer, Offers, fit, formula, hardware, shard
from harness.api.loading import load_profile, load_recipe, load_snapshot
from harness.api.measuring import run
from harness.api.reporting import Report, read_runs, report
