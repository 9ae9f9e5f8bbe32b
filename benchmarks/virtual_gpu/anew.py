"""Make recorded traces anew on virtual GPUs, and say where each parts from its recording.

    python -m benchmarks.virtual_gpu.anew [DEVICE/NAME ...] [--sample N] [--seed WORD] [--out FILE]

Takes PyTorch's CUDA build and no GPU. Recordings are those of tests/recordings/virtual_gpu, such as
`h200/random-5-3`; a sample is the first N by a hash of the seed and the name, so nobody picks what is easy.
A recording says its recipe, device and settings: each runs in a process of its own, with the same. What FILE
has of the same versions is kept.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.command import GrowingTable, parser_of, versions_of
from benchmarks.gpu_programme.__main__ import how_to_start
from benchmarks.gpu_programme.import_results import sanitised_trace
from benchmarks.gpu_programme.recipes import Spec
from benchmarks.gpu_programme.tasks import (
    PACKAGES,
    Context,
    import_libraries,
    is_installed,
    modules_of,
    prepare_process,
)
from benchmarks.gpu_programme.trace_file import Trace, load_trace
from benchmarks.gpu_programme.traces import record
from benchmarks.traces import missing_libraries
from benchmarks.virtual_gpu.ranks import RANKS
from benchmarks.virtual_gpu.recipes import LIBRARIES
from benchmarks.virtual_gpu.recordings import RECORDED, first_difference
from harness.errors import InputError
from harness.system import write_whole

OF_THE_DEVICE = ("STAND_IN_CUDA", "VIRTUAL_GPU")
"""Settings of a recording that only say which device it was."""
ENDING = ".json.gz"


def names() -> list[str]:
    """Of every recording."""
    paths = RECORDED.rglob(f"*{ENDING}")
    return sorted(str(path.relative_to(RECORDED)).removesuffix(ENDING) for path in paths)


def sample(count: int, seed: str) -> list[str]:
    """`count` names, chosen by a hash."""
    return sorted(names(), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:count]


def why_not(trace: Trace) -> str | None:
    """Why a recording cannot be made anew here; None: it can."""
    with tempfile.TemporaryDirectory() as folder:
        modules = modules_of(trace.recipe(Path(folder)))
    lacking = [f"{PACKAGES[module]} is not installed" for module in modules if not is_installed(module)]
    return "; ".join([*missing_libraries(trace), *lacking]) or None


def made_anew(chosen: Sequence[str], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each recording: its actions, and where the new one parts from it (None: nowhere)."""
    traces = {name: load_trace(_path(name)) for name in chosen}
    reasons = {name: why_not(trace) for name, trace in traces.items()}
    yield from ({"recording": name, "skipped": reason} for name, reason in reasons.items() if reason)

    def alike(name: str) -> tuple[str, tuple[tuple[str, str], ...], str]:
        return _alike(name, traces[name])

    possible = sorted((name for name, reason in reasons.items() if not reason), key=alike)
    for (gpu, settings, cell), group in groupby(possible, key=alike):
        members = list(group)
        _run(gpu, dict(settings), cell, members, folder)
        for name in members:
            path = folder / f"{traces[name].name}{ENDING}"
            there = path.exists()
            difference = first_difference(load_trace(path), traces[name]) if there else "the run failed"
            yield {"recording": name, "actions": len(traces[name].entries), "difference": difference}


def _path(name: str) -> Path:
    path = RECORDED / f"{name}{ENDING}"
    if not path.exists():
        raise InputError(f"there is no recording {name}: give the path in {RECORDED.name}, without {ENDING}.")
    return path


def _alike(name: str, trace: Trace) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """What recordings of one virtual GPU have in common: device, settings, and the cell of a rank's."""
    settings = trace.provenance["settings"].items()
    kept = tuple(sorted((key, value) for key, value in settings if key not in OF_THE_DEVICE))
    return Path(name).parent.name, kept, trace.name if trace.name.startswith("ranks-") else ""


def _run(gpu: str, settings: dict[str, str], cell: str, members: list[str], folder: Path) -> None:
    """Make those anew that run on one virtual GPU; what fails leaves no file."""
    command = [sys.executable, "-m", "harness", "emulate", "--gpu", gpu]
    if cell:
        command += ["--world-size", str(RANKS), "--", sys.executable, "-m", "benchmarks.virtual_gpu.ranks"]
        command += [cell.removeprefix("ranks-"), "--record", str(folder / f"{cell}{ENDING}")]
    else:
        command += [
            "--",
            sys.executable,
            "-m",
            "benchmarks.virtual_gpu.anew",
            "--into",
            str(folder),
            *members,
        ]
    # the recordings are of a virtual GPU that gave addresses one above the other
    subprocess.run(command, env=os.environ | settings | {"VIRTUAL_GPU_ADDRESSES": "up"}, check=False)


def record_here(chosen: Sequence[str], folder: Path) -> None:
    """On the virtual GPU: each recording of one GPU anew, to a file of its name."""
    prepare_process("cuda")
    context = Context("cuda", False, folder)
    import_libraries(context)
    processes = get_context(how_to_start(context)[0])
    for name in chosen:
        process = processes.Process(target=_record, args=(context, load_trace(_path(name))))
        process.start()
        process.join()


def _record(context: Context, trace: Trace) -> None:
    fields, config = dict(trace.recipe_fields), trace.model_config
    layers = None if config is None else config["num_hidden_layers"]
    fields["model"] = fields["model"].removesuffix(f"-{layers}-layers")
    result = record(context, Spec(trace.name, None, fields, layers=layers))
    write_whole(context.out / f"{trace.name}{ENDING}", sanitised_trace(result["trace"], trace.name))


def main() -> int:
    """Exit status: 1 if a recording is not what is made now."""
    parser = parser_of("benchmarks.virtual_gpu.anew", __doc__)
    parser.add_argument("recording", nargs="*", help="default: all of them")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", default="", metavar="WORD")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into is not None:
        record_here(options.recording, options.into)
        return 0
    chosen = options.recording or sample(options.sample or len(names()), options.seed)
    head = {"versions": versions_of(LIBRARIES), "recordings": len(names())}
    name_of = itemgetter("recording")
    table = GrowingTable(options.out, head, name_of, order=name_of)
    with tempfile.TemporaryDirectory() as scratch:
        for row in made_anew([name for name in chosen if name not in table.rows], Path(scratch)):
            table.add(row)
            print(json.dumps(row), flush=True)
    return int(any(table.rows[name].get("difference") for name in chosen))


if __name__ == "__main__":
    sys.exit(main())
