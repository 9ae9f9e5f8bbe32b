"""Cells as tasks of a Ray cluster, each in a worker of its own; answers come back through Ray's object store.

Imports no torch.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.errors import InputError, first_line, needed
from harness.sweep.cell import Outcome
from harness.sweep.launchers.launcher import Lost, Question
from harness.sweep.launchers.remote_answer import MOST_AT_ONCE, answered, assignment, read_answer

ADDRESS = "address"
"""The option that names the cluster; without it, it is RAY_ADDRESS or this machine's."""
OURS = ("max_calls", "max_retries", "num_returns", "retry_exceptions")
"""Options that a user may not give: the sweep decides how often a cell is started, and in which process."""


class RayTasks:
    """The launcher `ray`."""

    def __init__(self, options: Mapping[str, Any], *, on_gpu: bool, tell: Callable[[str], None]) -> None:
        """`options` are those of ray.remote, and `address`. Joins the cluster.

        Raises MissingDependency without ray, InputError without a cluster or for options it does not take.
        """
        with needed("ray", "ray", "--launcher ray"):
            import ray
        options = dict(options)
        address = options.pop(ADDRESS, None)
        if ours := [name for name in options if name in OURS]:
            raise InputError(f"--launcher-option {ours[0]}: the sweep decides that. Leave it out.")
        self._ray: Any = ray
        self.machine = {"launcher": "ray", "options": dict(sorted(options.items()))}
        self.at_once = MOST_AT_ONCE
        try:
            # the worker ends after one call, so that a cell leaves nothing in memory to the next one
            remote = self._ray.remote(max_calls=1, max_retries=0)(answered)
            gpu = {"num_gpus": 1} if on_gpu else {}
            self._task = remote.options(**gpu, **options)
        except (ValueError, TypeError) as error:
            raise InputError(f"--launcher ray does not take its options: {error}") from None
        self._joined = not self._ray.is_initialized()
        if self._joined:
            self._join(address)
        if on_gpu and not self._ray.cluster_resources().get("GPU"):
            tell("No node of the Ray cluster has a GPU now: cells that are measured wait until one has.")

    def start(self, question: Question) -> Any:
        return self._task.remote(assignment(question, self.machine))

    def ended(self, running: Sequence[Any]) -> Sequence[Any]:
        return self._ray.wait(list(running), num_returns=1)[0]

    def outcome(self, one: Any) -> Outcome | Lost:
        from ray.exceptions import RayError, RayTaskError

        try:
            return read_answer(self._ray.get(one), "what the task returned")
        except RayTaskError as error:  # before a cell's own code ran: without harness there, for example
            lines = [line for line in str(error).splitlines() if line.strip()]
            return Outcome("failed", lines[-1].strip() if lines else "the task failed", traceback=str(error))
        except RayError as error:
            return Lost(f"its worker ended without an answer: {first_line(error)}")

    def close(self, running: Sequence[Any]) -> None:
        for one in running:
            self._ray.cancel(one, force=True)
        if self._joined:
            self._ray.shutdown()

    def _join(self, address: str | None) -> None:
        where = address or os.environ.get("RAY_ADDRESS") or "auto"
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that starts here reports no usage
        main = threading.current_thread() is threading.main_thread()
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            _knock(where)
            self._ray.init(where, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise InputError(
                f"--launcher ray: no cluster answers at {where}: {first_line(error)}. Start one with "
                "`ray start --head`, name it with --launcher-option address=HOST:PORT, or give address=local "
                "to start one here."
            ) from None
        finally:
            if main:  # Ctrl-C and SIGTERM are this command's
                for number, handler in kept.items():
                    signal.signal(number, handler)


def _knock(where: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray would try for minutes."""
    host, colon, port = where.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()
