"""When Python's collector of reference cycles runs: during a simulation, only where the code says so.

Left alone it runs whenever enough objects were made: at a moment of the step that depends on what the process
did before, looking each time through the million objects that the imported libraries made, for a third of the
time of a command. Imports no torch: it is needed while torch is imported.
"""

import atexit
import gc
import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def collected_by_hand() -> Generator[None]:
    """Inside, reference cycles are freed by gc.collect() only."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def older_objects_kept() -> Generator[None]:
    """Inside, gc.collect() looks at objects made inside only, which takes milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def end_process(status: int) -> NoReturn:
    """Exit as sys.exit(status) would from the main thread, but leave it to the operating system to free the
    memory: to take apart all that the libraries made, one object after the other, takes more than a second.

    Threads are waited for and functions registered to run at exit do run, as in the interpreter's own exit
    (Py_FinalizeEx in CPython's pylifecycle.c) and in that of multiprocessing's own processes.
    """
    if not (hasattr(threading, "_shutdown") and hasattr(atexit, "_run_exitfuncs")):  # CPython's own
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
