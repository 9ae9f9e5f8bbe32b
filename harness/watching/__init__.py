"""Starts any training command so that its processes record their loops.

Imports no torch: what runs within the command is harness/loops.
"""
# pyright: reportUnusedImport=false

from harness.watching.largest import (
    Try,
    Values,
    expected_largest,
    largest_that_fits,
    parse_values,
    tried,
    with_value,
)
from harness.watching.launch import parse_steps, run_watched
