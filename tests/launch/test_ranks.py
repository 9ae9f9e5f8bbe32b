"""`harness run --gpus N` over gloo: what a run leaves, and what becomes of all when one rank fails."""

import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from harness.step_profile.step_profile import StepProfile
from harness.training.model import build_training
from tests.support.places import MODELS, ROOT
from tests.support.tiny import CPU, tiny
from tests.support.trust_report import Tried

KILLS = int(os.environ.get("KILLS", "3"))
LONGEST_S = 120
RECIPE = f"model: {MODELS / 'llama.json'}\nprecision: fp32\nmicro_batch_size: 2\nseq_len: 32\n"
RUN = ["harness", "run", "mine.yaml", "parallel=fsdp", "warmup_steps=0", "--out", "run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


@contextmanager
def started(arguments: list[str], folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=surroundings | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield run
    finally:
        for process in (*psutil.Process(run.pid).children(recursive=True), run) if run.poll() is None else ():
            process.kill()
        run.wait()


def printed(run: subprocess.Popen[str]) -> str:
    """All that the command says until it ends."""
    return re.sub(r"\s+", " ", run.communicate(timeout=LONGEST_S)[0])


def ranks_of(run: subprocess.Popen[str], steps: int, folder: Path) -> dict[int, psutil.Process]:
    """The processes by rank, once so many steps are done."""
    log, until = folder / "run" / "log.jsonl", time.monotonic() + LONGEST_S
    while not log.exists() or log.read_text().count("\n") < steps:
        assert run.poll() is None, printed(run)
        assert time.monotonic() < until
        time.sleep(0.02)
    children = psutil.Process(run.pid).children()
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def losses(run: Path) -> list[float]:
    """Of every line of the log, which must be whole and in order."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def test_one_process_is_not_started_several_times(folder: Path) -> None:
    with started(["harness", "run", "mine.yaml", "--gpus", "2"], folder) as run:
        found = printed(run)
    assert run.returncode == 2, found
    assert "parallel: none is a step of one process. Set parallel=fsdp" in found


def test_a_run_leaves_one_folder_and_goes_on_with_other_ranks(folder: Path) -> None:
    with started([*RUN, "steps=4", "checkpoint_every=3", "--gpus", "2", "--json"], folder) as run:
        out, _ = run.communicate(timeout=LONGEST_S)
    assert run.returncode == 0, out
    profile = StepProfile.read(folder / "run" / "profile.json")
    ranks = [StepProfile.read(folder / f"run/ranks/{rank}/profile.json") for rank in (0, 1)]
    assert profile.complete
    assert profile.recipe["dp_shard"] == 2
    assert profile.ranks is not None
    assert [rank.rank for rank in profile.ranks.ranks] == [0, 1]
    assert profile.ranks.ended_by is None
    peaks = [rank.memory.peak_allocated_bytes or 0 for rank in ranks]
    assert profile.memory.peak_allocated_bytes == max(peaks) == peaks[profile.ranks.peak_rank]
    for rank, stats in zip(ranks, profile.ranks.ranks, strict=True):
        waited = {name: phase.communication_s for name, phase in rank.phases.items()}
        assert stats.communication_s == waited
        assert (waited["forward"] or 0) > 0  # gathers
        assert (waited["backward"] or 0) > 0  # gathers, and sums gradients
    assert profile.step.loss == ranks[0].step.loss == ranks[1].step.loss == losses(folder / "run")
    rate = 2 * 2 * 32 / (ranks[profile.ranks.peak_rank].step.time_s.median or 0)
    assert profile.step.tokens_per_s == pytest.approx(rate)

    shutil.rmtree(folder / "run" / "checkpoints" / "step-6")  # as if it had been killed before
    other = ["micro_batch_size=1", "steps=4", "checkpoint_every=3", "--gpus", "4", "--resume", "run"]
    with started([*RUN[:-1], "other", *other], folder) as run:
        said = printed(run)
    assert run.returncode == 0, said
    assert losses(folder / "other") == pytest.approx(losses(folder / "run"), rel=1e-6)


@pytest.mark.parametrize("whole", [False, True], ids=["in parts", "whole"])
def test_an_evaluation_and_a_checkpoint_of_all_ranks(folder: Path, *, whole: bool) -> None:
    asked = ["--phases", "train,eval,save", "--eval-batches", "3", "--eval-batch-size", "2"]
    asked += ["--full-state-dict"] if whole else []
    with started([*RUN, "steps=1", "--gpus", "2", *asked], folder) as run:
        said = printed(run)
    assert run.returncode == 0, said
    first, second = (StepProfile.read(folder / f"run/ranks/{rank}/profile.json") for rank in (0, 1))
    for profile in (first, second):
        assert profile.evaluation is not None
        rows, length = 2 * 3 * 2, 32  # of both ranks
        assert profile.evaluation.logits_bytes == rows * length * 264 * 4
        assert profile.evaluation.ranks == 2
    assert "evaluation of 3 batches of 2 rows on each of 2 ranks" in said
    saved = [profile.checkpoint for profile in (first, second) if profile.checkpoint is not None]
    shares = [checkpoint.weights_bytes or 0 for checkpoint in saved]
    model = build_training(tiny(), CPU).model  # of the same config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert sum(shares) == 4 * parameters
    assert (shares[1] == 0) == whole
    assert not list((folder / "run").rglob("checkpoint-*"))


def test_a_rank_that_is_killed_ends_all_and_what_they_knew_is_kept(folder: Path, tried: Tried) -> None:
    chosen, kills = random.Random(KILLS), Counter[int]()
    for attempt in range(KILLS):
        number, steps = chosen.randrange(2), chosen.randrange(1, 6)
        where = folder / str(attempt)
        where.mkdir()
        (where / "mine.yaml").write_text(RECIPE)
        with started([*RUN, "steps=5000", "checkpoint_every=2", "--gpus", "2"], where) as run:
            ranks = ranks_of(run, steps, where)
            time.sleep(chosen.random() / 10)
            ranks[number].kill()
            said = printed(run)
            assert all(not rank.is_running() for rank in ranks.values())
        assert run.returncode == 137, said
        *before, reason = re.findall("harness: .{28}", said)
        assert reason == f"harness: rank {number} was killed by SIGKILL", said
        # the other may have met it in a sum before it was ended
        assert all("another rank is gone" in line for line in before), said
        assert len(losses(where / "run")) >= steps
        other = StepProfile.read(where / f"run/ranks/{1 - number}/profile.json")
        whole = StepProfile.read(where / "run/profile.json")
        assert not other.complete
        assert whole.ranks is not None
        assert whole.ranks.ended_by == f"rank {number} was killed by SIGKILL"
        assert not list((where / "run").rglob("*.partial")) or number == 0
        kills[number] += 1
        shutil.rmtree(where)
    outcome = "all ranks ended, exit 137 with the rank named; the log whole, the other's profile kept"
    for number, times in sorted(kills.items()):
        fault = f"`harness run --gpus 2`, SIGKILL to rank {number}"
        tried("Killed at a random moment", fault, outcome, times=times)


def test_a_rank_that_hangs_is_found(folder: Path) -> None:
    with started([*RUN, "steps=5000", "--gpus", "2", "--patience", "10"], folder) as run:
        ranks_of(run, 2, folder)[1].send_signal(signal.SIGSTOP)
        said = printed(run)
    assert run.returncode == 137, said
    assert re.search(r"harness: rank [01] gave no sign of life for \d+ s; last heard: rank 0 in", said)
    assert re.search(r"rank 1 in \w+ of step \d+", said)


def test_a_rank_that_runs_out_of_memory_ends_all_with_its_reason(folder: Path) -> None:
    with started([*RUN, "steps=5000", "micro_batch_size=64", "--gpus", "2"], folder) as run:
        rank = ranks_of(run, 1, folder)[1]
        held = rank.memory_info().vms
        resource.prlimit(rank.pid, resource.RLIMIT_AS, (held - 2**28, held))
        said = printed(run)
    assert run.returncode == 3, said
    assert "harness: rank 1: out of memory" in said
    whole = StepProfile.read(folder / "run/profile.json")
    assert whole.oom is not None
    assert whole.ranks is not None
    assert whole.ranks.peak_rank == 1


def test_ctrl_c_leaves_a_profile_of_what_is_known(folder: Path) -> None:
    with started([*RUN, "steps=5000", "--gpus", "2"], folder) as run:
        ranks_of(run, 2, folder)
        run.send_signal(signal.SIGTERM)
        said = printed(run)
    assert run.returncode == 143, said
    assert not StepProfile.read(folder / "run/profile.json").complete


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["dp_shard=3", "--gpus", "2"], {}, "dp_shard 3 x tp 1 = 3, and there are 2 processes"),
        (["--gpus", "2", "cpu_offload=true"], {}, ": cpu_offload: there is no GPU here"),
        (["--gpus", "2", "--device", "cpu:1"], {}, "every rank takes a GPU of its own"),
        ([], {"RANK": "0", "WORLD_SIZE": "x"}, "are no numbers"),
        ([], {"RANK": "2", "WORLD_SIZE": "2"}, "ranks count from 0"),
        (["--patience", "1"], {"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 of 2 did not find the others at"),
    ],
)
def test_what_cannot_start_is_a_sentence(
    arguments: list[str], environment: dict[str, str], said: str, folder: Path
) -> None:
    with socket.socket() as taken:  # a port in use, by something that is no rendezvous
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        with started([*RUN, *arguments], folder, **(where | environment if environment else {})) as run:
            found = printed(run)
    assert run.returncode == 2, found
    assert said in found
    assert "Traceback" not in found
    assert not (folder / "run").exists()


def test_a_machine_without_a_loopback_network_is_told_at_once(folder: Path) -> None:
    alone = ["unshare", "--map-root-user", "--net"]  # a network of its own, in which nothing is up
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody have a network of their own")
    command = [*alone, sys.executable, "-m", *RUN, "--gpus", "2"]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    assert "the ranks could not be started: localhost cannot be reached" in run.stderr
    assert "frame #" not in run.stderr
    assert not (folder / "run" / "profile.json").exists()


@pytest.mark.parametrize(("rank", "patience"), [(0, 600), (1, 2)])
def test_what_an_earlier_run_left_at_the_rendezvous_is_no_rendezvous(
    rank: int, patience: int, folder: Path
) -> None:
    """Its store still answers at the port, with its keys: rank 0 cannot have the port, rank 1 waits there."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("default_pg/0", "of a run that is over")
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with started([*RUN, "--patience", str(patience)], folder, **where, **place) as run:
        found = printed(run)
    assert run.returncode == 2, found
    assert f"rank {rank} of 2 did not find the others at 127.0.0.1:{store.port}" in found
    assert "is nothing of an earlier run left there?" in found
    assert not (folder / "run").exists()


def two_machines(folder: Path, *arguments: str) -> list[list[str]]:
    """What one types on each of two machines that share a folder: torchrun, and a rank on each."""
    torchrun = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    # found by a file, where machines have a port: another program may take a port before it is used
    meeting = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-id", "one"]
    where = ["--rdzv-endpoint", str(folder / "rendezvous"), "--local-addr", "127.0.0.1", "-m"]
    return [[*torchrun, *meeting, *where, *RUN, *arguments]] * 2


def test_torchrun_on_two_machines_leaves_one_folder(folder: Path) -> None:
    here, there = two_machines(folder, "steps=2")
    lo = {"GLOO_SOCKET_IFNAME": "lo"}
    with started(here, folder, **lo) as one, started(there, folder, **lo) as other:
        said = printed(one), printed(other)
    assert (one.returncode, other.returncode) == (0, 0), said
    assert sum("run folder: run" in words for words in said) == 1  # rank 0's machine says what came of it
    profile = StepProfile.read(folder / "run" / "profile.json")
    assert profile.complete
    assert profile.ranks is not None
    assert [rank.rank for rank in profile.ranks.ranks] == [0, 1]
    assert len(losses(folder / "run")) == 4


def test_a_machine_that_goes_away_ends_the_other(folder: Path) -> None:
    here, there = two_machines(folder, "steps=5000")
    lo = {"GLOO_SOCKET_IFNAME": "lo"}
    with started(here, folder, **lo) as one, started(there, folder, **lo) as other:
        ranks = {**ranks_of(one, 2, folder), **ranks_of(other, 2, folder)}
        assert sorted(ranks) == [0, 1]
        gone = other.pid in {parent.pid for parent in ranks[1].parents()}
        machine, left = (other, one) if gone else (one, other)  # rank 0's stays: it writes the log
        for process in (*psutil.Process(machine.pid).children(recursive=True), machine):
            process.kill()
        said = printed(left)
    assert left.returncode not in (0, None), said
    assert "another rank is gone" in said
    rest = StepProfile.read(folder / "run/ranks/0/profile.json")
    assert not rest.complete
    assert len(losses(folder / "run")) >= 2
