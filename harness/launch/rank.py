"""Being a rank: its place among the ranks, joining the others, and signs of life for a watcher.

torchrun and PyTorch's elastic agent tell a rank its place by the same variables of the environment: RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
"""

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import InputError, first_line
from harness.system import complain, is_writing

if TYPE_CHECKING:
    import torch

SIGNS_OF_LIFE = "HARNESS_SIGNS_OF_LIFE"
"""The variable with the folder to which each rank writes what it does, set by the process that watches."""
PATIENCE_S = 600.0
"""How long a rank waits for the others within one collective, unless --patience says otherwise: NCCL's
default, in seconds."""
GRACE_S = 3.0
"""How long a rank has to end by itself after a signal to end, in seconds. One that waits in C++ for a rank
that is gone never sees the signal."""


@dataclass(frozen=True)
class PlaceInRanks:
    """Which rank this process is."""

    rank: int
    world_size: int
    local_rank: int
    watched: bool
    """Whether `start_ranks` started it. Then the process that called that reports on the run, and no rank."""


def place_in_ranks() -> PlaceInRanks | None:
    """This process's place by the launcher's variables; None for a process that was not launched as a rank.
    Raises InputError for variables that are no such place."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, size, local = (int(os.environ.get(n, 0)) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except ValueError:
        raise InputError(
            "RANK, WORLD_SIZE and LOCAL_RANK are in the environment and are no numbers. Unset them, or start "
            "with torchrun, which sets them."
        ) from None
    if not 0 <= rank < size:
        raise InputError(f"RANK is {rank} and WORLD_SIZE {size}: ranks count from 0. Start with torchrun.")
    return PlaceInRanks(rank, size, local, SIGNS_OF_LIFE in os.environ)


@contextmanager
def joined(place: PlaceInRanks, device: "torch.device", patience_s: float = PATIENCE_S) -> Generator[None]:
    """Inside, this process and the others are one process group, with gloo for tensors on the host and NCCL
    for those on GPUs. Raises InputError where they cannot find one another.
    """
    import torch
    import torch.distributed as dist

    _end_after_signal()
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)
    # PyTorch waits in C++ without end for an answer of whatever listens at that address
    giving_up = threading.Timer(patience_s + GRACE_S, _give_up, [place])
    giving_up.daemon = True
    giving_up.start()
    try:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl",
            # a watcher can tell which rank hangs, and the ranks that wait only that one does: it goes first
            timeout=timedelta(seconds=patience_s * (3 if place.watched else 1)),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(_not_found(place, first_line(error))) from None
    finally:
        giving_up.cancel()
    try:
        yield
    finally:
        dist.destroy_process_group()


def _not_found(place: PlaceInRanks, why: str) -> str:
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"rank {place.rank} of {place.world_size} did not find the others at {where}: {why}. "
        "Is that address reachable and the port free, did every machine start with the same --rdzv-id "
        "and --nnodes, and is nothing of an earlier run left there? GLOO_SOCKET_IFNAME names the network."
    )


def _give_up(place: PlaceInRanks) -> None:
    os._exit(complain(_not_found(place, "what listens there does not answer"), InputError.exit_status))


class SignsOfLife:
    """The file in which a rank says what it is doing, overwritten in place; none where nobody watches."""

    def __init__(self, place: PlaceInRanks) -> None:
        folder = os.environ.get(SIGNS_OF_LIFE)
        path = None if folder is None else Path(folder, str(place.rank))
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def tell(self, doing: str) -> None:
        """Write that the phase `doing` begins; "" when the run is over."""
        if self._file is not None:
            line = f"{os.getpid()} {time.time():.3f} {doing}".ljust(79)
            os.pwrite(self._file, f"{line}\n".encode(), 0)


def _end_after_signal() -> None:
    """From now on a signal to end, or the end of the process that started this rank, ends the rank even where
    it waits in C++: GRACE_S later, or when the file that it is writing is whole.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    parent = os.getppid()

    def end_after_grace() -> None:
        number = os.read(reading, 1)[0]
        time.sleep(GRACE_S)
        while is_writing():
            time.sleep(0.1)
        os._exit(128 + number)

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    for task in (end_after_grace, watch_parent):
        threading.Thread(target=task, daemon=True).start()
