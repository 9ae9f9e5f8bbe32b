"""Which of several ranks that ended badly is the cause, by the agent's own records of them."""

import itertools
import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from harness.launch import agent

GONE = "another rank is gone, in optimizer_step after 6 steps."
LATE = "another rank did not come to a sum in time, in backward after 1 steps."
GLOO = "RuntimeError: [third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"
OF_ITS_OWN = "out of memory in forward"


class _Sees:
    """A watcher of ranks none of which hung."""

    hanging = None


def failure(folder: Path, rank: int, exitcode: int, message: str | None, at_s: int) -> ProcessFailure:
    told = folder / f"{rank}.json"
    if message is not None:
        reason = {"message": message, "extraInfo": {"py_callstack": "", "timestamp": str(at_s)}}
        told.write_text(json.dumps({"message": reason}))
    found = ProcessFailure(local_rank=rank, pid=rank + 1, exitcode=exitcode, error_file=str(told))
    found.timestamp = at_s
    return found


@pytest.mark.parametrize(
    ("ended", "status", "rank", "reason"),
    [
        ([(2, GONE, 5), (-9, None, 5)], 137, 1, "rank 1 was killed by SIGKILL"),
        ([(2, LATE, 5), (-9, None, 5)], 137, 1, "rank 1 was killed by SIGKILL"),
        ([(1, GLOO, 5), (-11, None, 6)], 139, 1, "rank 1 was killed by SIGSEGV"),
        ([(-15, None, 5), (3, OF_ITS_OWN, 5)], 3, 1, "rank 1: out of memory in forward"),
        ([(143, None, 5), (2, GONE, 5), (3, OF_ITS_OWN, 6)], 3, 2, "rank 2: out of memory in forward"),
        ([(3, OF_ITS_OWN, 5), (-9, None, 15)], 3, 0, "rank 0: out of memory in forward"),
        ([(2, GONE, 5), (-15, None, 6)], 2, 0, f"rank 0: {GONE}"),
    ],
)
def test_the_cause_is_the_rank_that_did_not_end_for_another(
    ended: list[tuple[int, str | None, int]], status: int, rank: int, reason: str, tmp_path: Path
) -> None:
    failures = {number: failure(tmp_path, number, *how) for number, how in enumerate(ended)}
    for order in itertools.permutations(failures.items()):
        found = agent._ending(ChildFailedError("run", dict(order)), _Sees())  # type: ignore[arg-type]
        assert (found.status, found.rank, found.reason) == (status, rank, reason)
