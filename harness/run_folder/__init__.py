"""What a run leaves on disk, whole or not at all."""

from harness.run_folder.checkpoint_files import steps_done_of, verify, write_checkpoint
from harness.run_folder.rank_folder import RankFolder
from harness.run_folder.run_folder import RunFolder

__all__ = ["RankFolder", "RunFolder", "steps_done_of", "verify", "write_checkpoint"]
