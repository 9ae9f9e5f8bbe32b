"""Any training command, watched: started so that its processes record their loops, and summed up over ranks.

Imports no torch: what runs within the command is harness/loops.
"""

from harness.watching.launch import parse_steps, run_watched
from harness.watching.ranks import RankSummary, rank_folders, summary_of_ranks

__all__ = ["RankSummary", "parse_steps", "rank_folders", "run_watched", "summary_of_ranks"]
