"""What every answer returns: the profile of one step, as JSON and in words."""

from harness.step_profile.in_words import MEMORY_KINDS, explain_oom, leak_in_words
from harness.step_profile.step_profile import (
    CATEGORIES,
    MAX_FILE_BYTES,
    MOST_WEIGHTS,
    PHASES,
    Allocation,
    HardwareSummary,
    LeakReport,
    MemoryBreakdown,
    MemoryStats,
    NotFiniteReport,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    StepStats,
    TimeStats,
)

__all__ = [
    "CATEGORIES",
    "MAX_FILE_BYTES",
    "MEMORY_KINDS",
    "MOST_WEIGHTS",
    "PHASES",
    "Allocation",
    "HardwareSummary",
    "LeakReport",
    "MemoryBreakdown",
    "MemoryStats",
    "NotFiniteReport",
    "OutOfMemoryReport",
    "PhaseStats",
    "StepProfile",
    "StepStats",
    "TimeStats",
    "explain_oom",
    "leak_in_words",
]
