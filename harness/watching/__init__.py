"""Any training command, watched: started so that its processes record their loops.

Imports no torch: what runs within the command is harness/loops.
"""

from harness.watching.launch import parse_steps, run_watched

__all__ = ["parse_steps", "run_watched"]
