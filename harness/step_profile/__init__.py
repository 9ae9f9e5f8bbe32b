"""What every answer returns: the profile of one step, as JSON and in words."""
# pyright: reportUnusedImport=false

from harness.step_profile.between_steps import (
    PHASES_BETWEEN_STEPS,
    CheckpointStats,
    EvaluationStats,
    EvaluationWay,
)
from harness.step_profile.fields import Count, Details, Fields, Quantity
from harness.step_profile.in_words import (
    KERNELS,
    MEMORY_KINDS,
    NCCL_COMMUNICATOR,
    SMALL_SHARE,
    WITHOUT_HOST,
    between_steps_in_words,
    change_of_time_in_words,
    explain_oom,
    higher_than_steps,
    is_tight,
    leak_in_words,
    peak_in_words,
    ranks_in_words,
    spare_bytes,
    time_in_words,
    verdict,
)
from harness.step_profile.memory import CATEGORIES, MOST_STEPS, MemoryBreakdown, MemoryStats, StepPeak
from harness.step_profile.step_profile import (
    MAX_FILE_BYTES,
    MAX_VALUES,
    MOST_RANKS,
    MOST_WEIGHTS,
    OTHER_PHASES,
    PHASES,
    Allocation,
    HardwareSummary,
    LeakReport,
    NotFiniteReport,
    OutOfMemoryReport,
    RanksReport,
    RankStats,
    StepProfile,
)
from harness.step_profile.times import PhaseStats, StepStats, TimeStats, utilization
