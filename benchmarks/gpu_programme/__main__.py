"""The hardware programme, on Linux with an NVIDIA GPU: `python -m benchmarks.gpu_programme --all --out DIR`.

Every part ends within 8 minutes, needs no network, and writes DIR/<part>.json anew after each piece, so
that what was measured stays whatever happens next. From there,
`python -m benchmarks.gpu_programme.import_results DIR` brings it into the repository.
"""

import argparse
import importlib
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from benchmarks.gpu_programme.tasks import (
    Context,
    Piece,
    Result,
    StartMethod,
    import_libraries,
    prepare_process,
    run_pieces,
)
from harness.errors import InputError
from harness.system.files import write_whole

FORMAT = "harness-gpu"
VERSION = 1
BUDGET_S = 400.0
MAX_FILE_BYTES = 15 * 2**20


@dataclass(frozen=True)
class Part:
    """`benchmarks.<module>.<pieces>(context)` lists what there is to do."""

    title: str
    module: str
    pieces: str = "pieces"
    workers: int = 1
    """Pieces at a time: more than one where the GPU's time has nothing to do with it."""


PARTS = {
    "traces": Part("every action of the allocator, in small but real recipes", "traces", workers=3),
    "validate": Part("full-size recipes, measured", "validate"),
    "calibrate": Part("what kernels, copies and launches reach on this device", "calibrate"),
    "profile": Part("every kernel of a step, by torch.profiler", "kernels_in_steps"),
    "overhead": Part("harness step over bare loop", "overhead"),
    "peers": Part("the same training by transformers.Trainer and TRL", "peers"),
    "cases": Part("a LoRA base, one field changed at a time", "validate", "case_pieces"),
    "processes": Part("the step of one recipe in several processes", "validate", "process_pieces"),
    "oom": Part("a recipe that cannot fit", "oom"),
    "predict": Part(
        "the same recipes by napkin and simulated, with this machine's libraries", "predict", workers=6
    ),
}
"""In order of worth. Each gives one file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit status 0 when the programme ran, whatever became of its pieces; 2 for bad input;
    130 when interrupted.
    """
    try:
        return _run(_parser().parse_args(arguments))
    except InputError as error:
        print(f"benchmarks.gpu_programme: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("benchmarks.gpu_programme: interrupted; what is done is written", file=sys.stderr)
        return 130


def run_part(
    name: str,
    context: Context,
    start: StartMethod,
    header: dict[str, Any],
    chosen: list[Piece],
    budget_s: float,
) -> dict[str, Any]:
    """Run the pieces of one part, writing its file after each of them. Returns what is in the file."""
    part = PARTS[name]
    results: list[Result] = []
    document = _document(name, header, results)
    began_s = time.monotonic()
    _say(f"{name}: {part.title} ({len(chosen)} pieces, at most {budget_s:.0f} s)")
    for result in run_pieces(chosen, context, start, workers=part.workers, until_s=began_s + budget_s):
        results.append(result)
        if len(_as_json(document)) > MAX_FILE_BYTES:
            results[-1] = {"name": result["name"], "status": "error", "reason": "the file would be too large"}
        write_whole(context.out / f"{name}.json", _as_json(document))
        _say(f"  {_in_words(results[-1])}")
    counts = Counter(result["status"] for result in results)
    summary = ", ".join(f"{number} {status}" for status, number in counts.items())
    _say(f"{name}: {summary or 'nothing to do'}, in {time.monotonic() - began_s:.0f} s")
    return document


def chosen_pieces(name: str, context: Context, only: Sequence[str]) -> list[Piece]:
    """The pieces of a part whose name matches one of the patterns `only` (none: all of them)."""
    part = PARTS[name]
    pieces = getattr(importlib.import_module(f"benchmarks.gpu_programme.{part.module}"), part.pieces)(context)
    return [piece for piece in pieces if not only or any(fnmatch(piece.name, pattern) for pattern in only)]


def how_to_start(context: Context) -> tuple[StartMethod, dict[str, Any]]:
    """The faster way to start a process that can use the device, and what such a process says of it.

    Raises InputError if there is no way, with what the device said.
    """
    probe = Piece("device", examine)
    said: Result = {}
    # macOS kills a forked process that uses its numerical libraries
    methods: tuple[StartMethod, ...] = ("spawn",) if sys.platform == "darwin" else ("fork", "spawn")
    for method in methods:
        (said,) = run_pieces([probe], context, method, until_s=time.monotonic() + 60)
        if said["status"] == "ok":
            return method, said["result"]
        _say(f"starting processes by {method} does not work here: {said.get('reason')}")
    raise InputError(
        f"no process can use the device: {said.get('reason')}. Run it on a Linux machine where nvidia-smi "
        "lists an NVIDIA GPU, or give --tiny: the same code with small models on the CPU."
    )


def examine(context: Context) -> Result:
    """The device, the driver and the library versions, from a process that has used the device."""
    import torch

    from harness.hardware.table import TABLE_NAMES
    from harness.measure.cpu import CpuObserver
    from harness.measure.cuda import CudaObserver
    from harness.system.versions import provenance

    device = torch.device(context.device)
    on_gpu = context.device == "cuda"
    torch.ones(1, device=device).sum().item()
    observer = CudaObserver(device, with_history=False) if on_gpu else CpuObserver()
    hardware = observer.hardware("fp32")
    return {
        "device": {
            "name": hardware.name,
            "kind": hardware.kind,
            "memory_bytes": hardware.memory_bytes,
            "table_name": TABLE_NAMES.get(hardware.name),
            **observer.facts(),
        },
        "provenance": provenance(),
    }


def _run(options: argparse.Namespace) -> int:
    names: list[str] = list(PARTS if options.all else dict.fromkeys(options.part or []))
    context = Context("cpu" if options.tiny else "cuda", options.tiny, options.out or Path())
    if options.list:
        _list(names, context, options.only)
        return 0
    if not names or options.out is None:
        raise InputError(
            "say what to run, --all or --part NAME, and where to write, --out DIR. --list shows the parts."
        )
    try:
        context.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {context.out}: cannot make the folder: {error.strerror}.") from None
    prepare_process(context.device)
    import_libraries(context)
    start, device = how_to_start(context)
    _say(f"{device['device']['name']}, processes by {start}")
    header = {"tiny": context.tiny, "started": datetime.now(UTC).isoformat(timespec="seconds"), **device}
    for name in names:
        try:
            run_part(name, context, start, header, chosen_pieces(name, context, options.only), options.budget)
        except Exception as error:  # whatever is wrong with one part, the others are worth having
            reason = f"{type(error).__name__}: {error}"
            _say(f"{name}: failed as a whole: {reason}")
            result = {"name": "all", "status": "error", "reason": reason, "traceback": traceback.format_exc()}
            write_whole(context.out / f"{name}.json", _as_json(_document(name, header, [result])))
    return 0


def _document(part: str, header: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION, "part": part, **header, "results": results}


def _list(names: list[str], context: Context, only: Sequence[str]) -> None:
    if not names:
        for name, part in PARTS.items():
            print(f"{name:10} {part.title}")
    for name in names:
        for piece in chosen_pieces(name, context, only):
            print(f"{name:10} {piece.name}")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.gpu_programme", __doc__)
    add = parser.add_argument
    add("--part", action="append", choices=list(PARTS), help="run this part (may be repeated)")
    add("--all", action="store_true", help="run every part, in order of worth")
    add("--list", action="store_true", help="list the parts, or the pieces of the parts given")
    add("--out", type=Path, metavar="DIR", help="folder for one JSON file a part")
    add("--only", action="append", default=[], metavar="PATTERN", help="pieces to run, e.g. 'llama-*'")
    add("--budget", type=float, default=BUDGET_S, metavar="S", help="seconds a part may start pieces in")
    add("--tiny", action="store_true", help="small models, on the CPU")
    return parser


def _as_json(document: dict[str, Any]) -> str:
    return json.dumps(document, allow_nan=False) + "\n"


def _in_words(result: Result) -> str:
    seconds = f" in {result['seconds']:.1f} s" if "seconds" in result else ""
    reason = f": {result['reason']}" if "reason" in result else ""
    return f"{result['status']:8} {result['name']}{seconds}{reason}"


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
