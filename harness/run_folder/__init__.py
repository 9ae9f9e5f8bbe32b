"""What a run leaves on disk, whole or not at all."""

from harness.run_folder.checkpoint_files import steps_done_of, verify, write_checkpoint
from harness.run_folder.collected import (
    RANKS,
    folder_of_rank,
    profiles_of_ranks,
    put_folder_together,
    put_together,
    read_profile,
    world_size_of,
)
from harness.run_folder.rank_folder import RankFolder
from harness.run_folder.run_folder import FILES, RunFolder, new_path, read_command
from harness.run_folder.secrets import without_secrets

__all__ = [
    "FILES",
    "RANKS",
    "RankFolder",
    "RunFolder",
    "folder_of_rank",
    "new_path",
    "profiles_of_ranks",
    "put_folder_together",
    "put_together",
    "read_command",
    "read_profile",
    "steps_done_of",
    "verify",
    "without_secrets",
    "world_size_of",
    "write_checkpoint",
]
