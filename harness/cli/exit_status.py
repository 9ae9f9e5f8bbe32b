"""The exit statuses of the commands besides those of the errors in errors.py."""

from harness.system import CTRL_C_STATUS

BEYOND_TOLERANCE = A_CELL_FAILED = 1
"""`harness validate` found a prediction off by more than --tolerance; a cell of `harness sweep` crashed."""
OUT_OF_MEMORY = 3
"""The recipe or the program does not fit the device."""
NOT_FINITE = 4
"""`harness run` stopped at a loss that is nan or infinite."""
GREW = 5
"""`harness diff` found a peak that grew by more than --fail-above."""
INTERRUPTED = CTRL_C_STATUS
