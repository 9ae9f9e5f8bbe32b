"""The textbook's arithmetic for a decoder's memory and time: about right, every term named. No torch."""
# pyright: reportUnusedImport=false

from harness.napkin.derivation import derive_terms
from harness.napkin.memory import Memory, Moment
from harness.napkin.prediction import estimate, predict, profile, warnings_of
from harness.napkin.terms import Term, sum_of
from harness.napkin.timing import sent_byte_s, step_time
