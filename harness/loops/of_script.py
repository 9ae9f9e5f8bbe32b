"""The recorder of the script that runs: for those who ask for one in Python."""

from __future__ import annotations

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
    first, last = steps
    if not 1 <= first <= last:
        raise InputError(f"steps={steps!r}: give the first and the last step to record, e.g. (3, 5).")
    command = without_secrets([sys.argv[0] or "python", *sys.argv[1:]])
    path = own_folder(Path(out) if out is not None else new_path(Path(command[0]).stem or "python"))
    return LoopRecorder(RunFolder(path, "watch", command), command, Window(first, last))
