"""The process of a command, which answers signals before the commands are imported and until it is over."""

import signal
import sys
from typing import NoReturn


def script() -> NoReturn:
    """main() in a process that is over after it: what `harness` and `python -m harness` run."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's would say which import a Ctrl-C was in
    from harness.system import end_process, signals_answered

    with signals_answered():
        from harness.cli.app import main

        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:  # a terminal without our signs spells them
            reconfigure(errors="backslashreplace")
        try:
            main()
        except SystemExit as ended:
            end_process(ended.code if isinstance(ended.code, int) else 1)
