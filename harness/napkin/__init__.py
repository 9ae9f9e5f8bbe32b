"""Answer one: closed form, every term named. It needs no torch."""

from harness.napkin.derivation.text import render
from harness.napkin.memory.moments import Memory, Moment, required_bytes
from harness.napkin.memory.sizes import Sizes
from harness.napkin.prediction import estimate, predict, profile, warnings_of
from harness.napkin.ranks.traffic import traffic
from harness.napkin.tape.collectives import ring
from harness.napkin.timing import Timing

__all__ = [
    "Memory",
    "Moment",
    "Sizes",
    "Timing",
    "estimate",
    "predict",
    "profile",
    "render",
    "required_bytes",
    "ring",
    "traffic",
    "warnings_of",
]
