"""Watches a whole process until its end, called by the code that `harness watch` puts into it."""

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from harness.errors import HarnessError, InputError
from harness.loops.finder import LOOKED_FOR, LoopFinder
from harness.loops.memory_of_steps import Window
from harness.loops.recorder import LoopRecorder, own_folder
from harness.run_folder import FILES, RunFolder, new_path, without_secrets
from harness.system import complain


def recorder_of_script(steps: tuple[int, int], out: str | Path | None) -> LoopRecorder:
    """A recorder of `steps` (first and last, counted from 1) into `out`, or profiles/runs/<script>-<time>.

    Raises InputError for impossible steps, and for a folder that is taken or cannot be written.
    """
    # a caller's script may give anything
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


_active: list[LoopFinder] = []
"""The finder that watches this process, or none."""


def watched_already() -> bool:
    """Whether this process is watched now."""
    return any(not finder.recorder.over for finder in _active)


def watch_process(out: Path, command: list[str], steps: tuple[int, int], caller: object) -> None:
    """Watch this process from now until it ends, for `harness watch`. `caller`: the module that is being
    called or the optimizer that is stepping at this moment, which hooks that are added now do not see.
    """
    if watched_already():
        return
    try:
        path = own_folder(out)
        if any(os.path.lexists(path / name) for name in FILES):  # written by another process of the command
            path = path / f"process-{os.getpid()}"
        folder = RunFolder(path, "watch", command)
    except HarnessError as error:
        complain(f"this process is not watched: {error}", 1)
        return
    finder = LoopFinder(LoopRecorder(folder, command, Window(*steps)))
    until_the_end(finder)
    finder.begins_with(caller)


def until_the_end(finder: LoopFinder) -> Callable[[], None]:
    """Watch until the process ends, by itself or by an exception that nothing catches. Returns a function
    that ends the watching sooner.
    """
    recorder = finder.recorder
    _active.append(finder)
    before, leave = sys.excepthook, os._exit

    def died(kind: Any, error: BaseException, traceback: Any) -> None:
        recorder.failed(error)
        before(kind, error, traceback)

    def ended() -> None:
        """End the watching and write the profile: the loop is over."""
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
        """In place of os._exit, which skips the atexit functions, of which `ended` is one."""
        if os.getpid() == process:
            ended()
        leave(status)

    process = os.getpid()
    sys.excepthook, os._exit = died, left
    atexit.register(ended)
    os.register_at_fork(after_in_child=forked)
    return ended
