"""A step's requests of memory as expressions of its sizes: derived from simulations, evaluated without torch."""

from harness.formula.expression import Point
from harness.formula.piece import Piece
from harness.formula.request_log import RequestLog
from harness.formula.scratch import (
    MAX_VALUES_PER_THREAD,
    at_most,
    embedding_pieces,
    radix_sort_rows_scratch,
    radix_sort_scratch,
    reduction_staging,
    scan_scratch,
    scan_scratch_at_most,
)

__all__ = [
    "MAX_VALUES_PER_THREAD",
    "Piece",
    "Point",
    "RequestLog",
    "at_most",
    "embedding_pieces",
    "radix_sort_rows_scratch",
    "radix_sort_scratch",
    "reduction_staging",
    "scan_scratch",
    "scan_scratch_at_most",
]
