"""Reports runs that are over: a process for each tracker, which is waited for."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.track.told import Told, recipe_config, told_of
from harness.track.trackers import KEEPS_FILES
from harness.virtual_gpu import outside

Say = Callable[[str], None]
"""Is called with sentences: where a run can be seen, what failed."""
PATIENCE_S = 300.0
"""How many seconds a tracker has. One that needs longer is ended."""
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of a rank's environment, which a tracker's process does not get."""


def track_run(trackers: Sequence[str], folder: Path, name: str, about: Mapping[str, Any], say: Say) -> None:
    """Tell `trackers` (from tracker_names) the run in `folder`. `about`: its recipe's fields, or what else
    ran. No failure of a tracker raises here."""
    if not trackers:
        return
    told = told_of(folder, name, recipe_config(about))
    with tempfile.TemporaryDirectory() as made:
        if any(tracker in KEEPS_FILES for tracker in trackers):
            told.files = _kept_files(folder, Path(made))
        track_all(trackers, [told], say)


def track_all(trackers: Sequence[str], runs: Sequence[Told], say: Say) -> None:
    """Tell each tracker runs that are over. None of them raises here.

    A tracker has a process of its own, which sees no GPU and is no rank: one that crashes or hangs is a
    sentence.
    """
    environment = {name: value for name, value in outside(os.environ).items() if name not in DISTRIBUTED}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    for tracker in trackers:
        taken = [asdict(run) for run in runs if run.steps or tracker in KEEPS_FILES]
        if not taken:
            continue
        say(f"{tracker}: it is told now, for {PATIENCE_S:.0f} seconds at most")
        missed, printed = "", b""
        with tempfile.TemporaryFile() as chatter:
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "harness.track", tracker],
                    input=json.dumps(taken).encode(),
                    stdout=subprocess.PIPE,
                    stderr=chatter,
                    env=environment,
                    timeout=PATIENCE_S,
                )
                printed = done.stdout
                if done.returncode:
                    chatter.seek(0)
                    lines = chatter.read().decode(errors="replace").strip().splitlines()
                    missed = f"its process ended early: {(lines or [f'status {done.returncode}'])[-1]}"
            except subprocess.TimeoutExpired as late:
                printed, missed = late.output or b"", f"it did not take all in {PATIENCE_S:.0f} seconds"
            except KeyboardInterrupt:
                missed = "it was not waited for"
        for line in printed.decode(errors="replace").splitlines():
            say(line)
        if missed:
            say(f"{tracker}: {missed}. The run folder has every number.")


def _kept_files(folder: Path, made: Path) -> list[str]:
    """The files that a tracker keeps: profile and snapshot, and a report, which is written into `made`."""
    files = [folder / name for name in ("profile.json", "snapshot.pickle") if (folder / name).exists()]
    try:
        from harness.report import read_run, write_report

        write_report([read_run(folder)], made / "report.html")
        files.append(made / "report.html")
    except InputError:  # no jinja2, or nothing to draw
        pass
    return [str(file) for file in files]
