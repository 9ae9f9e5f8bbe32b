"""Control over Python's collector of reference cycles: in a simulation it runs only where the code says so.

By itself it runs whenever enough objects were made: at a moment of the step that depends on what the process
did before, and each time it looks through the million objects that the imported libraries made, which takes a
third of a command's time. Imports no torch, since it is needed while torch is imported.
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
    """Inside the `with` block, reference cycles are freed by gc.collect() only."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def older_objects_kept() -> Generator[None]:
    """Inside the `with` block, gc.collect() looks only at objects made there, which takes milliseconds."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def end_process(status: int) -> NoReturn:
    """Exit as sys.exit(status) would from the main thread, but leave freeing the memory to the operating
    system: Python would delete all objects of the libraries one by one, which takes more than a second.

    Threads are waited for and functions registered with atexit run, as in the interpreter's own exit
    (Py_FinalizeEx in CPython's pylifecycle.c) and in that of multiprocessing's processes.
    """
    if not (hasattr(threading, "_shutdown") and hasattr(atexit, "_run_exitfuncs")):  # CPython has both
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
