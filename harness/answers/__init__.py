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
from harness.answers.one_answer import emulated, measured, predicted, simulated

__all__ = [
    "SOURCES",
    "Case",
    "Comparison",
    "Row",
    "compare",
    "complete",
    "different_fields",
    "emulated",
    "gather",
    "measured",
    "predicted",
    "quantities",
    "simulated",
    "unexplained_lines",
]
