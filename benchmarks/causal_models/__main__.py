"""The table of all causal language models: does the simulation say what PyTorch's allocator counts?

    python -m benchmarks.causal_models [TYPE ...] [--method full] [--out FILE] [--keep DIR]
    python -m benchmarks.causal_models --methods [--out FILE]       other ways to train, one type each
    python -m benchmarks.causal_models --vision [--out FILE]        models that see

A row for each type of transformers' own mapping, and for each way to train it: whether it builds, whether a
step runs on the CPU, the peak simulated and emulated on the virtual GPU (which takes PyTorch's CUDA build),
how many bytes they are apart, and operators that nobody has looked at. Models are small (tiny.py); every step
runs in a process of its own. What FILE has of the same versions is kept, but for rows asked for by name.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.causal_models.steps import (
    ALL_METHODS,
    METHODS,
    MORE_METHODS,
    NEED_A_GPU,
    simulate_beside,
    train_on_cpu,
)
from benchmarks.causal_models.tiny import LORA_TARGETS, small_config
from benchmarks.causal_models.vision import VISION_METHODS, with_small_tower
from benchmarks.command import GrowingTable, Row, parser_of, versions_of
from benchmarks.gpu_programme.tasks import (
    Context,
    Piece,
    Result,
    import_libraries,
    prepare_process,
    run_pieces,
)

GPU = "h100"
LIMIT_S = 300.0
LIBRARIES = ("torch", "transformers", "peft")
BATCH = 24
"""Rows that one virtual GPU runs: starting it takes seconds."""


def versions() -> dict[str, str]:
    """Those that decide."""
    return versions_of(LIBRARIES)


def all_types() -> list[str]:
    """The types that transformers maps to a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def models_that_see() -> list[str]:
    """The types whose processors are known to harness."""
    from harness.training.images import KNOWN

    return sorted(KNOWN)


def config_file(kind: str, folder: Path) -> Path | str:
    """The small config of a type, written to a file; or the sentence of transformers that there is none."""
    from transformers import CONFIG_MAPPING

    path = folder / f"{kind}.json"
    try:
        path.write_text(json.dumps(with_small_tower(small_config(CONFIG_MAPPING[kind]()))))
    except Exception as error:  # of a hundred classes' own checks
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return path


def rows_of(wanted: Sequence[tuple[str, str]], folder: Path, python: str) -> Iterator[Row]:
    """The rows of (type, method), each when it is known: how far it came, and the reason where it ended."""
    context = Context("cpu", False, folder)
    rows: dict[str, Row] = {}
    asked: dict[str, dict[str, Any]] = {}
    for kind, method in wanted:
        name = f"{kind}.{method}"
        rows[name] = {"type": kind, "method": method}
        if kind in LORA_TARGETS and "adapter" in ALL_METHODS[method]:
            rows[name]["lora_targets"] = LORA_TARGETS[kind]
        config = config_file(kind, folder)
        if isinstance(config, str):
            yield rows[name] | {"builds": config}
        else:
            asked[name] = {"config": str(config), "method": method}

    def ended(result: Result, at: str) -> Iterator[Row]:
        """The row of one that goes no further."""
        if result["status"] != "ok":
            del asked[result["name"]]
            reason = result.get("reason", result["status"])
            yield rows[result["name"]] | {at: reason.replace(f"{folder}{os.sep}", "")}

    on_cpu = {name: given for name, given in asked.items() if given["method"] not in NEED_A_GPU}
    for result in _run(train_on_cpu, on_cpu, context):
        yield from ended(result, "trains")
    traces = {name: str(folder / f"{name}.json.gz") for name in asked}
    for result in _emulated([{"name": name, **asked[name], "trace": traces[name]} for name in asked], python):
        yield from ended(result, "emulated")
    for result in _run(simulate_beside, {name: {"trace": traces[name]} for name in asked}, context):
        yield from ended(result, "simulated")
        if result["status"] == "ok":
            yield rows[result["name"]] | result["result"]


def _run(task: Any, arguments: dict[str, dict[str, Any]], context: Context) -> Iterator[Result]:
    pieces = [Piece(name, task, given, limit_s=LIMIT_S) for name, given in arguments.items()]
    yield from run_pieces(pieces, context, "fork", until_s=time.monotonic() + LIMIT_S * len(pieces))


def _emulated(rows: list[Row], python: str) -> Iterator[Result]:
    if not rows:
        return
    command = [python, "-m", "harness", "emulate", "--gpu", GPU, "--"]
    command += [python, "-m", "benchmarks.causal_models.emulated"]
    done = subprocess.run(command, input=json.dumps(rows), stdout=subprocess.PIPE, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    yield from answers
    answered = {each["name"] for each in answers}
    for row in rows:
        if row["name"] not in answered:
            yield {"name": row["name"], "status": "died", "reason": "the virtual GPU's process ended"}


def main() -> int:
    """Exit status: 0."""
    parser = parser_of("benchmarks.causal_models", __doc__)
    parser.add_argument("type", nargs="*")
    parser.add_argument("--method", action="append", choices=ALL_METHODS)
    parser.add_argument("--methods", action="store_true")
    parser.add_argument("--vision", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for configs and traces")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with PyTorch's CUDA build")
    options = parser.parse_args()
    prepare_process("cpu")
    import_libraries(Context("cpu", False, Path()))
    key = itemgetter("type", "method")
    table = GrowingTable(options.out, {"versions": versions(), "gpu": GPU}, key, order=key)
    wanted = [(kind, method) for kind in options.type or all_types() for method in options.method or METHODS]
    if options.methods:
        wanted = [("mixtral" if "experts" in method else "llama", method) for method in MORE_METHODS]
    if options.vision:
        methods = options.method or VISION_METHODS
        wanted = [(kind, method) for kind in options.type or models_that_see() for method in methods]
    left = [each for each in wanted if options.type or each not in table.rows]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for start in range(0, len(left), BATCH):
            for row in rows_of(left[start : start + BATCH], folder, options.python):
                print(json.dumps(row), flush=True)
                table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
