"""Ask one answer about one recipe, gather what is there, and put the answers side by side."""

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
from harness.answers.gathering import Case, complete, gather
from harness.answers.one_answer import emulated, measured, predicted, simulated
from harness.answers.phases import after_training
from harness.answers.two_profiles import asked_by_one, diff_lines, diff_profiles, simulated_by

__all__ = [
    "SOURCES",
    "Case",
    "Comparison",
    "Forecast",
    "Row",
    "after_training",
    "asked_by_one",
    "compare",
    "complete",
    "diff_lines",
    "diff_profiles",
    "different_fields",
    "emulated",
    "forecast_on_cpu",
    "gather",
    "measured",
    "predicted",
    "quantities",
    "simulated",
    "simulated_by",
    "unexplained_lines",
]
