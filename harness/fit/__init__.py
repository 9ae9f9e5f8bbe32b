"""What would fit: searched by arithmetic or by simulation, and what to change when nothing does."""
# pyright: reportUnusedImport=false

from harness.fit.advice import advise
from harness.fit.card_count import among, compare_counts, read_counts, render_counts
from harness.fit.changes import Change, by_arithmetic, suggestions
from harness.fit.confirmed import ConfirmedFit, fit_confirmed
from harness.fit.derived import DerivedFormula, derive, tensor_in_words
from harness.fit.device_choice import compare_hardware, render_choice, render_table
from harness.fit.exact import fit_exact
from harness.fit.held_back import cost_in_words
from harness.fit.host_memory import check_host_memory
from harness.fit.lengths import fit_lengths, lengths_document, lengths_lines
from harness.fit.offers import Offer, read_tokens
from harness.fit.search import fit
from harness.fit.side_by_side import Divisions, divisions
from harness.fit.simulations import Simulations
from harness.fit.text import exact_lines, fit_document, fit_lines
