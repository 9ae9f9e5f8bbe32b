"""What a run leaves on disk, whole or not at all."""

from harness.run_folder.checkpoint_files import steps_done_of, verify, write_checkpoint
from harness.run_folder.rank_folder import RankFolder
from harness.run_folder.run_folder import FILES, RunFolder, new_path, read_command, without_secrets

__all__ = [
    "FILES",
    "RankFolder",
    "RunFolder",
    "new_path",
    "read_command",
    "steps_done_of",
    "verify",
    "without_secrets",
    "write_checkpoint",
]
