"""Ask one answer about one recipe, gather what is there, and put the answers side by side."""

from harness.answers.cases import Case, complete, gather
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
from harness.answers.gate import Allowed, allowed, beyond
from harness.answers.one_answer import emulated, measured, predicted, simulated
from harness.answers.phases import after_training
from harness.answers.two_profiles import diff_lines, diff_profiles, first_divergences, simulated_by

__all__ = [
    "SOURCES",
    "Allowed",
    "Case",
    "Comparison",
    "Forecast",
    "Row",
    "after_training",
    "allowed",
    "beyond",
    "compare",
    "complete",
    "diff_lines",
    "diff_profiles",
    "different_fields",
    "emulated",
    "first_divergences",
    "forecast_on_cpu",
    "gather",
    "measured",
    "predicted",
    "quantities",
    "simulated",
    "simulated_by",
    "unexplained_lines",
]
