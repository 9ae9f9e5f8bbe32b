"""What `harness watch` finds of programs of others on a virtual GPU, against PyTorch's own counters.

Every program runs twice, unchanged: by `harness emulate --out`, which leaves the allocator's statistics of a
process that nobody watches, and by `harness watch`, which records all of its steps. The peak that the watched
steps reached, the sum of its categories, and the unwatched process's peak are to agree.

    python -m benchmarks.virtual_gpu.watched [PROGRAM ...] [--out profiles/watched.json]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.run_folder import folder_of_rank, profiles_of_ranks
from harness.step_profile import StepProfile
from harness.system import PACKAGE, provenance, write_whole

PROGRAMS = PACKAGE.parent / "tests" / "virtual_gpu" / "programs"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
ACCELERATE = (
    *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
    *("--num_machines", "1", "--mixed_precision", "bf16", "--dynamo_backend", "no"),
    *("--main_process_port", "0"),
)
CASES: dict[str, tuple[tuple[str, ...], int]] = {
    "plain loop": ((sys.executable, "plain.py"), 3),
    "transformers Trainer, full": ((sys.executable, "trainer.py", "full"), 3),
    "TRL SFTTrainer": ((sys.executable, "sft.py", "plain"), 3),
    "TRL DPOTrainer": ((sys.executable, "preferences.py", "dpo"), 2),
    "Lightning": ((sys.executable, "lit.py"), 3),
    "Trainer, torchrun, 2 ranks": ((*TORCHRUN, "trainer.py", "full"), 3),
    "Trainer, accelerate launch, 2 ranks": ((*ACCELERATE, "trainer.py", "full"), 3),
}
"""By name: the command, in PROGRAMS, and how many steps it takes."""
LIBRARIES = {"Lightning": "lightning"}
"""What a program needs that the virtual GPU's environment may not have."""


def both(command: tuple[str, ...], steps: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each process: what was found, and the three peaks in bytes."""
    alone, run = folder / "alone", folder / "watched"
    command = tuple(str(PROGRAMS / word) if word.endswith(".py") else word for word in command)
    gpus = "2" if "-m" in command else "1"
    _run("emulate", "--gpu", "h100", "--gpus", gpus, "--out", str(alone), "--", *command, folder=folder)
    options = ("--gpu", "h100", "--gpus", gpus, "--steps", f"1-{steps}", "--out", str(run))
    _run("watch", *options, "--", *command, folder=folder)
    ranks = [(rank, folder_of_rank(run, rank)) for rank in profiles_of_ranks(run)]
    return [_row(where, steps, _unwatched(alone, rank)) for rank, where in ranks or [(None, run)]]


def _run(*words: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-4000:]}")


def _unwatched(alone: Path, rank: int | None) -> int:
    """The peak of allocated bytes of a process, over all of its devices."""
    found = [json.loads(path.read_text()) for path in alone.glob("*.json") if "-times" not in path.name]
    peaks = [
        max(device["memory_stats"]["allocated_bytes.all.peak"] for device in process["devices"])
        for process in found
        if process["rank"] == rank
    ]
    return max(peaks)


def _row(run: Path, steps: int, unwatched: int) -> dict[str, Any]:
    profile = StepProfile.read(run / "profile.json")
    lines = (run / "log.jsonl").read_text().splitlines()
    return {
        "steps": len(lines),
        "steps_of_the_program": steps,
        "phases": profile.phase_names(),
        "source": profile.source,
        "complete": profile.complete,
        "peak_bytes": profile.memory.peak_allocated_bytes,
        "sum_of_categories_bytes": profile.memory.at_peak.total_bytes(),
        "at_peak": profile.memory.at_peak.model_dump(exclude_none=True),
        "unwatched_peak_bytes": unwatched,
    }


def main() -> None:
    parser = parser_of("benchmarks.virtual_gpu.watched", __doc__)
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--out", type=Path, help="write the rows here, as JSON")
    given = parser.parse_args()
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in given.programs or CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = both(*CASES[name], Path(folder))
        for row in rows[name]:
            print(name, json.dumps(row), flush=True)
        if given.out:
            write_whole(given.out, _document(rows, given.out))


def _document(rows: dict[str, list[dict[str, Any]]], before: Path) -> str:
    """With the programs that are in the file already and were not run now."""
    known = json.loads(before.read_text())["programs"] if before.exists() else {}
    programs = {name: found for name in CASES if (found := rows.get(name) or known.get(name))}
    document = {"benchmark": "watched", "programs": programs, "provenance": provenance()}
    return json.dumps(document, indent=1) + "\n"


if __name__ == "__main__":
    main()
