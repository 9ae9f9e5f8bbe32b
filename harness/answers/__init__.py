"""The profile of one recipe by each kind of answer, and the answers side by side.

The kinds of answer are napkin, simulated, emulated and measured.
"""
# pyright: reportUnusedImport=false

from harness.answers.comparison import (
    SOURCES,
    Comparison,
    Row,
    compare,
    different_fields,
    quantities,
    unexplained_lines,
)
from harness.answers.forecast import Forecast, forecast_on_cpu
from harness.answers.gate import allowed, beyond, diff_document
from harness.answers.gathering import Case, complete, gather
from harness.answers.one_answer import emulated, measured, predicted, simulated
from harness.answers.phases import after_training
from harness.answers.two_profiles import asked_by_one, diff_lines, diff_profiles, simulated_by
