"""The memory requests of a training step as expressions of its sizes, derived from simulations. No torch."""
# pyright: reportUnusedImport=false

from harness.formula.expression import Factors, Point, Sum
from harness.formula.formula import Formula, Times, outcome_of, point_of, timed_on
from harness.formula.outcome import kept_bytes
from harness.formula.piece import Piece, Size
from harness.formula.repeated_layers import NotRepeated, RepeatedLayers
from harness.formula.request_log import DIED, Event, Label, RequestLog
from harness.formula.scratch import (
    MAX_VALUES_PER_THREAD,
    Ruled,
    at_most,
    count_scratch,
    embedding_pieces,
    liger_logits,
    radix_sort_rows_scratch,
    radix_sort_scratch,
    reduction_staging,
    scan_scratch,
    scan_scratch_at_most,
    select_scratch,
)
from harness.formula.store import load, save
from harness.formula.terms import Term, Terms, in_dimensions, terms_at_peak
