"""How every command uses stdout and stderr: errors in one sentence, JSON alone on stdout, quiet libraries."""

import json
import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from harness.errors import printable
from harness.system.interruption import CTRL_C_STATUS


def complain(message: str, status: int) -> int:
    """Print on stderr what is wrong. Returns `status`, the exit status to end with.

    In a process that PyTorch's elastic agent started, which has TORCHELASTIC_ERROR_FILE, the message is also
    written to that file, where the agent looks for the reason
    (torch/distributed/elastic/multiprocessing/errors). An interruption by the agent is not printed there: it
    would be read as the reason.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or status != CTRL_C_STATUS:
        print(f"harness: {message}", file=sys.stderr)
    if error_file:
        reason = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": reason}))
    return status


@contextmanager
def stdout_kept_for_json(kept: bool) -> Generator[None]:
    """Inside the `with` block, if `kept`, what libraries or their C code print to stdout goes to stderr."""
    if not kept:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def quiet_libraries() -> None:
    """Have libraries print errors and no notices, and transformers fetch no kernels from the Hub."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("BITSANDBYTES_NOWELCOME", "1")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's notes that it starts and stops
    os.environ["USE_HUB_KERNELS"] = "NO"
    import warnings

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which CPU kernels it did not find
    warnings.filterwarnings("ignore", category=UserWarning, module=r"bitsandbytes|transformers|peft|torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"bitsandbytes|transformers|peft|torch")


@cache
def say_once(line: str) -> None:
    """Write `line` to stderr, unless this process has done so before."""
    print(printable(line), file=sys.stderr)


@cache
def warn_of_trusted_code(model: str) -> None:
    """Write to stderr, once for each `model` and in red, that the model's own Python code may run."""
    text = f"trust_remote_code: the Python code that comes with {model} may run, with all that you may do."
    coloured = "NO_COLOR" not in os.environ and (sys.stderr.isatty() or "FORCE_COLOR" in os.environ)
    red, plain = ("\x1b[1;31m", "\x1b[0m") if coloured else ("", "")
    print(f"{red}{printable(text)}{plain}", file=sys.stderr)
