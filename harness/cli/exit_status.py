"""The exit statuses of the commands beside those that errors carry (errors.py)."""

from harness.system import CTRL_C_STATUS

BEYOND_TOLERANCE = A_CELL_FAILED = 1
OUT_OF_MEMORY = 3
NOT_FINITE = 4
GREW = 5
INTERRUPTED = CTRL_C_STATUS
