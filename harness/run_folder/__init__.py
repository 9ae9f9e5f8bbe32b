"""The folder that a run leaves on disk, where every file is whole or not there."""
# pyright: reportUnusedImport=false

from harness.run_folder.checkpoint_files import steps_done_of, verify, write_checkpoint
from harness.run_folder.collected import (
    RANKS,
    folder_of_rank,
    profiles_of_ranks,
    put_folder_together,
    put_together,
    read_profile,
)
from harness.run_folder.run_folder import FILES, RankFolder, RunFolder, new_path, read_command
from harness.run_folder.secrets import without_secrets
