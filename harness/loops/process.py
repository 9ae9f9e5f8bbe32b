"""Watching a whole process: begun by what `harness watch` puts into it, ended with it."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import HarnessError
from harness.loops.finder import LOOKED_FOR, LoopFinder
from harness.loops.memory_of_steps import Window
from harness.loops.place import own_folder
from harness.loops.recorder import LoopRecorder
from harness.run_folder import FILES, RunFolder
from harness.system import complain

_active: list[LoopFinder] = []
"""The one that watches this process, if there is one."""


def watched_already() -> bool:
    """Whether somebody watches this process."""
    return any(not finder.recorder.over for finder in _active)


def watch_process(out: Path, command: list[str], steps: tuple[int, int], caller: object) -> None:
    """Watch this process from now on until it ends, for `harness watch`. `caller`: the module that is being
    called just now, or the optimizer that is stepping: no hook that is put in now hears of that.
    """
    if watched_already():
        return
    try:
        path = own_folder(out)
        if any(os.path.lexists(path / name) for name in FILES):  # by another process of the command
            path = path / f"process-{os.getpid()}"
        folder = RunFolder(path, "watch", command)
    except HarnessError as error:
        complain(f"this process is not watched: {error}", 1)
        return
    finder = LoopFinder(LoopRecorder(folder, command, Window(*steps)))
    until_the_end(finder)
    finder.begins_with(caller)


def until_the_end(finder: LoopFinder) -> Callable[[], None]:
    """Watch until the process ends, of itself or by an exception that nobody catches. Returns what ends it
    sooner.
    """
    recorder = finder.recorder
    _active.append(finder)
    before, leave = sys.excepthook, os._exit

    def died(kind: Any, error: BaseException, traceback: Any) -> None:
        recorder.failed(error)
        before(kind, error, traceback)

    def ended() -> None:
        """The loop is over."""
        atexit.unregister(ended)
        finder.stop()
        if sys.excepthook is died:
            sys.excepthook = before
        if os._exit is left:
            os._exit = leave
        if not recorder.over and not finder.has_stepped:
            complain(
                f"no step was found in {sys.argv[0] or 'this process'}: {finder.found()}. Looked for: "
                f"{LOOKED_FOR}. Nothing is written.",
                1,
            )
            recorder.over = True
        recorder.finish(unfinished=finder.unfinished)
        _active.clear()

    def forked() -> None:  # a worker of a DataLoader, for example: nothing of it is ours
        recorder.over = True
        atexit.unregister(ended)
        finder.stop()

    def left(status: int) -> NoReturn:
        """Without what Python does at its end, of which `ended` is a part."""
        if os.getpid() == process:
            ended()
        leave(status)

    process = os.getpid()
    sys.excepthook, os._exit = died, left
    atexit.register(ended)
    os.register_at_fork(after_in_child=forked)
    return ended
