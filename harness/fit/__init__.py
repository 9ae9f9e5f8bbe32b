"""What would fit: searched by arithmetic or by simulation, and what to change when nothing does."""

from harness.fit.advice import advise
from harness.fit.device_choice import compare_hardware, render_choice, render_table
from harness.fit.exact import ExactFit, fit_exact
from harness.fit.host_memory import check_host_memory
from harness.fit.search import Fit, fit, parse_bytes, with_memory
from harness.fit.sharding import shard

__all__ = [
    "ExactFit",
    "Fit",
    "advise",
    "check_host_memory",
    "compare_hardware",
    "fit",
    "fit_exact",
    "parse_bytes",
    "render_choice",
    "render_table",
    "shard",
    "with_memory",
]
