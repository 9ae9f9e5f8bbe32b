"""The recorder of the script that runs: for those who ask for one in Python."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from harness.errors import InputError
from harness.loops.memory_of_steps import Window
from harness.loops.place import own_folder
from harness.loops.recorder import LoopRecorder
from harness.run_folder import RunFolder, new_path, without_secrets


def recorder_of_script(steps: tuple[int, int], out: str | Path | None) -> LoopRecorder:
    """Records `steps` (first and last, counted from 1) into `out`, or profiles/runs/<script>-<time>.

    Raises InputError for impossible steps, and for a folder that is taken or cannot be written.
    """
    # whoever calls gives anything
    several: object = list(steps) if isinstance(steps, tuple | list) else steps
    if not (
        isinstance(several, list)
        and len(several) == 2
        and all(type(step) is int for step in several)
        and 1 <= several[0] <= several[1]
    ):
        raise InputError(
            f"steps={steps!r:.80}: give the first and the last step to record, counted from 1, e.g. (3, 5)."
        )
    if not isinstance(out, str | os.PathLike | None):
        raise InputError(f"out={out!r:.80}: give the path of a folder, or leave it out.")
    first, last = steps
    command = without_secrets([sys.argv[0] or "python", *sys.argv[1:]])
    path = own_folder(Path(out) if out is not None else new_path(Path(command[0]).stem or "python"))
    return LoopRecorder(RunFolder(path, "watch", command), command, Window(first, last))
