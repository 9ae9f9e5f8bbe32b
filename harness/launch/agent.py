"""Starting ranks on this machine with PyTorch's elastic agent, which torchrun uses too, and ending them
together.

The agent ends all ranks as soon as one fails. It cannot see that a rank hangs, so a watcher reads every
rank's signs of life, kills the rank that has been silent longest, and reports what each was doing last.
"""

import json
import logging
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError, first_line
from harness.launch.rank import SIGNS_OF_LIFE
from harness.system import in_environment

BETWEEN_LOOKS_S = 0.5
"""How often the watcher reads the signs of life, in seconds."""
SHUTDOWN_S = 10
"""The seconds between the agent's SIGTERM and its SIGKILL."""


@dataclass(frozen=True)
class Ending:
    """How the ranks ended: all well, or as the first that failed."""

    status: int = 0
    """The exit status; 128 + the signal for a rank that a signal killed."""
    rank: int | None = None
    """The rank that failed first; None where none did, and after a signal to end."""
    reason: str | None = None
    """Why they ended, in words; None where all ended well."""


def start_ranks(command: Sequence[str], num_ranks: int, patience_s: float) -> Ending:
    """Run `command` as `num_ranks` ranks of this machine, and return when the last has ended.

    Rank 0 writes to this process's output; what the others print is not shown. A rank that gives no sign of
    life for `patience_s` seconds within a step is killed, and then all are ended. After a signal to end,
    which the ranks get too, the status is 128 + the signal. Raises InputError where the agent cannot start.
    """
    _refuse_without_loopback(num_ranks)
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the Ending says in words what the agent would log
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    quiet = {rank: Std.ALL for rank in range(1, num_ranks)}
    with tempfile.TemporaryDirectory(prefix="harness-ranks-") as folder, _environment(Path(folder)) as signs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,  # two runs on one machine never meet
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=quiet),
        )
        watcher = _Watcher(signs, patience_s)
        try:
            with watcher:
                elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as failed:
            return _ending(failed, watcher)
        except SignalException as received:
            return Ending(128 + received.sigval, None, "interrupted")
        except (RuntimeError, OSError, RendezvousError, ValueError) as error:
            raise _not_started(num_ranks, first_line(error)) from error
    return Ending()


def _refuse_without_loopback(num_ranks: int) -> None:
    """Raise InputError where localhost cannot be reached. The agent would try for minutes."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        raise _not_started(num_ranks, f"localhost cannot be reached: {error.strerror or error}") from None


def _not_started(num_ranks: int, why: str) -> InputError:
    return InputError(
        f"--gpus {num_ranks}: the ranks could not be started: {why}. Has this machine a loopback network "
        "(`ip addr show lo`), and does localhost resolve?"
    )


@contextmanager
def _environment(folder: Path) -> Generator[Path]:
    """Inside, the environment has the variables that the ranks are to inherit. Gives the folder for their
    signs of life, which is in `folder`."""
    signs = folder / "signs"
    signs.mkdir()
    variables = {SIGNS_OF_LIFE: str(signs), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S)}
    if "OMP_NUM_THREADS" not in os.environ:  # the agent would set 1 and say so
        variables["OMP_NUM_THREADS"] = "1"
    if Path("/sys/class/net/lo").exists() and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine, whatever its network
    with in_environment(variables):
        yield signs


class _Watcher:
    """A thread that kills the rank which has been silent longest, once that is longer than the patience."""

    def __init__(self, signs: Path, patience_s: float) -> None:
        self._signs, self._patience_s = signs, patience_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.hanging: str | None = None
        """How long the killed rank was silent, and what each rank did last; None if none was killed."""

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(BETWEEN_LOOKS_S):
            signs = [sign for path in self._signs.iterdir() if (sign := _sign(path)) is not None]
            # in setup a model is downloaded or a checkpoint read, for as long as that takes
            in_a_step = [sign for sign in signs if sign[2] not in ("", "setup")]
            silent = min(in_a_step, key=lambda sign: sign[1], default=None)
            if silent is not None and time.time() - silent[1] > self._patience_s:
                pid, since = silent[:2]
                # of ranks within one phase nobody can tell from outside for which one the others wait
                where = ", ".join(
                    f"rank {sign[3]} in {sign[2]}" for sign in sorted(signs, key=lambda sign: sign[3])
                )
                self.hanging = f"gave no sign of life for {time.time() - since:.0f} s; last heard: {where}"
                os.kill(pid, signal.SIGKILL)
                return


def _sign(path: Path) -> tuple[int, float, str, int] | None:
    """A rank's sign of life: (process id, seconds since 1970, phase, rank); None while there is none."""
    pid, _, rest = path.read_text().partition(" ")
    since, _, doing = rest.partition(" ")
    return (int(pid), float(since), doing.strip(), int(path.name)) if doing else None


def _ending(failed: Any, watcher: _Watcher) -> Ending:
    """The ending that the agent's ChildFailedError is about."""
    rank, failure = min(failed.failures.items(), key=lambda item: _lateness(item[1]))
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        reason = watcher.hanging or f"was killed by {name}"
        return Ending(128 - failure.exitcode, rank, f"rank {rank} {reason}")
    return Ending(failure.exitcode, rank, f"rank {rank}: {_message(failure)}")


def _lateness(failure: Any) -> tuple[bool, int, bool]:
    """A sort key by which the failure that caused the others comes first. The agent's clock counts whole
    seconds, so a rank that a signal killed and one that could not go on without it may have the same time.
    """
    from harness.parallel import lost_rank

    by_the_agent = failure.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    follows = by_the_agent or (failure.exitcode > 0 and lost_rank(_message(failure)) is not None)
    return follows, failure.timestamp, failure.exitcode > 0


def _message(failure: Any) -> str:
    """Why a rank ended: what it wrote to the agent's file for errors (`complain` in system/streams.py), or
    else the last line that it printed to stderr, or else its exit status. Rank 0's output is shown, and in no
    file."""
    path = Path(failure.error_file)
    try:
        found: Mapping[str, Any] = json.loads(path.read_text())
        message = found["message"]
        message = message if isinstance(message, str) else message["message"]
    except (OSError, ValueError, KeyError, TypeError):
        printed = path.with_name("stderr.log")
        lines = printed.read_text(errors="replace").splitlines() if printed.exists() else []
        message = lines[-1] if lines else ""
    return message or f"exit status {failure.exitcode}"
