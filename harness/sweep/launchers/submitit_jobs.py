"""Cells as jobs of SLURM, by submitit: one job a cell, with its files in the sweep's folder, which all
machines see.

Imports no torch.
"""

import shutil
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import InputError, first_line, needed
from harness.sweep.cell import Outcome
from harness.sweep.launchers.launcher import Lost, Question
from harness.sweep.launchers.remote_answer import MOST_AT_ONCE, answered, assignment, read_answer

CLUSTER = "cluster"
"""The option that chooses among submitit's executors."""
TIMEOUT_MIN = 60
"""A job's time limit in minutes, without an option: submitit's own 5 minutes would end a large simulation."""
ONE_PROCESS = ("nodes", "tasks_per_node", "slurm_nodes", "slurm_ntasks_per_node")
"""Options that must be 1: a cell is one process."""
NOT_THE_MACHINE = (
    "name",
    "timeout_min",
    "mem_gb",
    "slurm_time",
    "slurm_account",
    "slurm_qos",
    "slurm_comment",
)
"""Options that do not affect a measurement."""
JOBS = "jobs"
"""The folder, within the sweep's, of submitit's files."""


class SubmititJobs:
    """The launcher `submitit`. A job writes its cell's file itself: if the sweep is killed, submitted jobs
    still finish, and the same command finds their answers."""

    def __init__(self, options: Mapping[str, Any], folder: Path, *, on_gpu: bool) -> None:
        """`options` are those of submitit's AutoExecutor.update_parameters, and `cluster`.

        Raises MissingDependency without submitit, InputError without SLURM or for options it does not take.
        """
        options = dict(options)
        cluster = options.pop(CLUSTER, "slurm")
        if cluster not in ("slurm", "local"):
            raise InputError(
                f"--launcher-option cluster={cluster}: there are slurm and local (this machine)."
            )
        if cluster == "slurm" and shutil.which("sbatch") is None:
            raise InputError(
                "--launcher submitit: this machine has no SLURM (there is no sbatch). Start the sweep where "
                "jobs are submitted, or give --launcher-option cluster=local to start them on this machine."
            )
        for name in ONE_PROCESS:
            if options.get(name, 1) != 1:
                raise InputError(f"--launcher-option {name}: a cell is one process. Leave it out.")
        self._local = cluster == "local"
        self._folder, self._cluster = folder, cluster
        name = f"harness-{folder.name}"[:100]
        self._parameters = {"timeout_min": TIMEOUT_MIN, "name": name, "gpus_per_node": int(on_gpu), **options}
        self.machine = {
            "launcher": "submitit",
            "options": {k: v for k, v in sorted(options.items()) if k not in NOT_THE_MACHINE},
            CLUSTER: cluster,
        }
        # jobs of one machine would share its first GPU, and its processors
        self.at_once = 1 if self._local else MOST_AT_ONCE
        with tempfile.TemporaryDirectory() as nowhere:
            self._opened(Path(nowhere))
        self._executor: Any = None

    def start(self, question: Question) -> Any:
        if self._executor is None:
            self._executor = self._opened(self._folder.absolute() / JOBS)
        try:
            return self._executor.submit(answered, assignment(question, self.machine, self._folder))
        except (RuntimeError, OSError) as error:
            raise InputError(f"--launcher submitit: a job was not taken: {_last_line(error)}.") from None

    def ended(self, running: Sequence[Any]) -> list[Any]:
        while not (ended := [job for job in running if job.done()]):
            time.sleep(0.1 if self._local else 1)  # on SLURM, done() looks for a file; sacct is asked seldom
        return ended

    def outcome(self, one: Any) -> Outcome | Lost:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            if self._local and not one.paths.result_pickle.exists():  # result() would wait for a slow disk
                raise UncompletedJobError(one.stderr() or "")
            outcome = read_answer(one.result(), f"job {one.job_id}")
        except FailedJobError as error:  # before a cell's own code ran, or at its time limit
            text = str(error).split(f"{'-' * 22}\n")[1:2] or [str(error)]
            outcome = Outcome("failed", f"job {one.job_id}: {_last_line(text[0])}", traceback=str(error))
        except UncompletedJobError as error:
            return Lost(
                f"job {one.job_id} ended without an answer ({one.state}): {_last_line(error)}. Is "
                f"{self._folder} on a file system that every machine sees? Its logs: {one.paths.folder}"
            )
        if outcome.status != "failed":
            paths = one.paths
            for path in (paths.submitted_pickle, paths.result_pickle, paths.stdout, paths.stderr):
                path.unlink(missing_ok=True)
            paths.submission_file.unlink(missing_ok=True)
        return outcome

    def close(self, running: Sequence[Any]) -> None:
        for job in running:
            job.cancel(check=False)

    def _opened(self, folder: Path) -> Any:
        with needed("submitit", "submitit", "--launcher submitit"):
            import submitit
        try:
            with warnings.catch_warnings(action="ignore"):  # that it puts slurm_ before partition=gpu
                executor = submitit.AutoExecutor(folder, cluster=self._cluster)
                executor.update_parameters(**self._parameters)
        except (NameError, ValueError, TypeError, AssertionError, RuntimeError) as error:
            raise InputError(
                f"--launcher submitit does not take its options: {first_line(error)}. Options are those of "
                "submitit's update_parameters; SLURM's own begin with slurm_, as slurm_partition=gpu."
            ) from None
        return executor


def _last_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip("- \n")]
    return lines[-1].rstrip(".") if lines else "it said nothing"
