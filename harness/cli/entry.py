"""The process of a command, which handles signals from before the commands are imported until it ends."""

import os
import signal
import sys
from typing import NoReturn


def script() -> NoReturn:
    """Run main() and end the process: what `harness` and `python -m harness` do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would print a traceback of an import
    for name in ("stdout", "stderr"):  # Python has none where the shell closed it; this takes its number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    from harness.system import end_process, signals_answered

    with signals_answered():
        from harness.cli.app import main

        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:  # a terminal that lacks a character shows its escape sequence
            reconfigure(errors="backslashreplace")
        try:
            main()
        except SystemExit as ended:
            end_process(ended.code if isinstance(ended.code, int) else 1)
