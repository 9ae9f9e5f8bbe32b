"""Recipes trained on ranks: processes on this machine that talk over gloo, started once for many recipes.

`python -m tests.support.ranks` is such a process; `trained_on` starts them and reads what rank 0 wrote.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.recipe.recipe import Recipe
from harness.training.loop import Kind, run_steps, set_up
from tests.support.places import ROOT
from tests.support.tiny import CPU, NullObserver

LONGEST_S = 900


class Result(NamedTuple):
    """What rank 0 saw of a recipe; one process that runs alone has the same to tell."""

    losses: list[float]
    """Of the whole step, over all ranks."""
    digests: dict[str, str]
    """Of the bytes of every whole weight before the first step, by name."""
    held_bytes: dict[str, int]
    """Of every weight on this rank, by name."""
    failed: str = ""


def trained(recipe: Recipe, steps: int) -> Result:
    """`recipe` trained in this process, which may be one of several ranks."""
    training, batches = set_up(recipe, CPU, NullObserver())
    named = dict(training.model.named_parameters())
    digests = {name: _digest(weight) for name, weight in named.items()}
    held = {name: getattr(weight, "_local_tensor", weight).nbytes for name, weight in named.items()}
    step_kinds: list[Kind] = ["timed"] * steps
    done = run_steps(training, batches, CPU, step_kinds, NullObserver())
    return Result([training.ranks.averaged(step.loss) for step in done], digests, held)


def trained_on(num_ranks: int, recipes: dict[str, Recipe], steps: int = 3) -> dict[str, Result]:
    """Every recipe trained on so many ranks, one recipe after the other."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = {name: recipe.model_dump(mode="json") for name, recipe in recipes.items()}
        Path(folder, "jobs.json").write_text(json.dumps({"steps": steps, "recipes": jobs}))
        base = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(num_ranks),
            "PYTHONFAULTHANDLER": "1",  # says where a rank was that a signal ended
        }
        command = [sys.executable, "-m", "tests.support.ranks", folder]
        ranks = [
            subprocess.Popen(command, env=base | {"RANK": str(rank)}, cwd=ROOT) for rank in range(num_ranks)
        ]
        try:
            statuses = [rank.wait(LONGEST_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        assert statuses == [0] * num_ranks, f"exit statuses of the ranks: {statuses}"
        found = json.loads(Path(folder, "results.json").read_text())
    return {name: Result(*values) for name, values in found.items()}


def _digest(weight: Tensor) -> str:
    whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight  # type: ignore[operator]
    return hashlib.sha256(whole.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _rank(folder: Path) -> None:
    jobs: dict[str, Any] = json.loads((folder / "jobs.json").read_text())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        world_size=int(os.environ["WORLD_SIZE"]),
        rank=int(os.environ["RANK"]),
        timeout=timedelta(seconds=60),
    )
    results = {}
    for name, fields in jobs["recipes"].items():
        try:
            results[name] = trained(Recipe(**fields), jobs["steps"])
        except Exception:  # the same on every rank, or the others time out
            results[name] = Result([], {}, {}, traceback.format_exc())
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    from harness.system import quiet_libraries

    quiet_libraries()
    _rank(Path(sys.argv[1]))
