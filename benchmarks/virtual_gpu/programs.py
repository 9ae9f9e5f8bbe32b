"""Programs of others on a virtual GPU, unchanged: the peak of each process, its seconds, every version.

    python -m benchmarks.virtual_gpu.programs [PROGRAM ...] [--size tiny|full] [--out FILE] [--list]

They come as their authors ship them: commands of TRL, accelerate, torchtune and LitGPT from their wheels, and
PEFT's example from a checkout of its repository. What they read is made here (checkpoint.py): nothing is
downloaded. What is not in this environment is looked for where these say:

    PROGRAMS_OF_OTHERS   folders of packages, each of `pip install --no-deps --target FOLDER -r
                         tests/virtual_gpu/programs/others.txt`: torchtune 0.6 wants a torchao that peft
                         refuses, so it stays beside the environment
    PEFT_EXAMPLES        the folder `examples` of a checkout of github.com/huggingface/peft; the committed
                         result is of its commit 5d602fdb
    REPOSITORIES_OF_OTHERS   a folder of checkouts: repositories.py
"""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.command import GrowingTable, parser_of
from benchmarks.virtual_gpu import checkpoint, repositories
from benchmarks.virtual_gpu.program_table import PROGRAMS, PYTHON, SIZES, TINY, TRL, Program, Size
from harness.errors import InputError
from harness.system import PACKAGE

MODELS = PACKAGE.parent / "recipes" / "models"
SAID = re.compile(r"(?:GPU peak memory|Memory Used)[^|\n]*")
"""What programs themselves print of their memory."""
FOLDERS = re.compile(r"^/.*/(?:site-packages/|examples/|(?=tests/))")


def model_config(size: Size) -> dict[str, Any]:
    """The contents of a config.json."""
    config = TINY if size.model is None else json.loads((MODELS / f"{size.model}.json").read_bytes())
    return config if size.layers is None else config | {"num_hidden_layers": size.layers}


def missing(name: str) -> str | None:
    """Why a program cannot run here; None: it can."""
    program = PROGRAMS[name]
    folders = os.environ.get("PROGRAMS_OF_OTHERS", "?").split(os.pathsep)
    if program.beside and not any(Path(folder, program.libraries[0]).exists() for folder in folders):
        return f"{program.libraries[0]} is not in the folder that PROGRAMS_OF_OTHERS names"
    if program.checkout and not repositories.folder_of(program.checkout).exists():
        return f"REPOSITORIES_OF_OTHERS names no folder that has {program.checkout}"
    if (
        name.startswith("PEFT examples/sft")
        and not Path(os.environ.get("PEFT_EXAMPLES", "?"), "sft").exists()
    ):
        return "PEFT_EXAMPLES names no folder of PEFT's examples"
    return None


def prepare(name: str, size: Size, folder: Path) -> None:
    """Make `model` and `rows` in `folder`."""
    program = PROGRAMS[name]
    if program.litgpt:
        making = [PYTHON, "-m", "benchmarks.virtual_gpu.checkpoint", "litgpt", size.litgpt_model]
        subprocess.run([*making, str(folder / "model")], env=environment(name), check=True)
    else:
        checkpoint.hugging_face(model_config(size), folder / "model")
    checkpoint.rows(program.rows, folder / "rows", count=16, length=size.length)
    if program.makes is repositories.images or program.makes is repositories.pictures:
        shutil.rmtree(folder / "rows")
    if program.makes is not None:
        make = f"from benchmarks.virtual_gpu.repositories import {program.makes.__name__} as make"
        code = f"from pathlib import Path; {make}; make(Path({str(folder / 'rows')!r}))"
        # from where `benchmarks` is
        subprocess.run([PYTHON, "-c", code], cwd=PACKAGE.parent, env=environment(name), check=True)


def environment(name: str) -> dict[str, str]:
    """Of the process that runs a program."""
    made = os.environ | {"DO_NOT_TRACK": "1"}  # Axolotl's reports wait for a network, for long
    if PROGRAMS[name].beside:
        made["PYTHONPATH"] = os.pathsep.join(
            filter(None, (made.get("PYTHONPATH"), made["PROGRAMS_OF_OTHERS"]))
        )
    return made


def run(name: str, size: str, gpu: str, folder: Path) -> dict[str, Any]:
    """A row: the command, its processes' peaks in bytes, in order of the ranks, and processor seconds."""
    program = PROGRAMS[name]
    prepare(name, program.size(size), folder)
    command = program.command(program.size(size))
    options = ["--gpu", gpu, "--gpus", str(program.gpus)]
    if program.world_size is not None:
        options += ["--world-size", str(program.world_size), "--rank", "0"]
    statistics = folder / "statistics"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [PYTHON, "-m", "harness", "emulate", *options, "--out", str(statistics), "--", *command],
        cwd=folder,
        env=environment(name),
        capture_output=True,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "program": name,
        "size": size,
        "gpu": gpu,
        "command": " ".join(["harness", "emulate", *options, "--", *_as_typed(command)]),
        "model": program.model
        or (program.size(size).litgpt_model if program.litgpt else program.size(size).model or "tiny"),
        "versions": _versions(program),
        "processes": _peaks(statistics),
        "failed": _why(done.stderr) if done.returncode else None,
        "processor_s": round(used, 1),
        "said": [" ".join(line.split()) for line in SAID.findall(done.stdout + done.stderr)],
        "published": asdict(program.published) if program.published and size == "full" else None,
    }


def _why(error: str) -> str:
    """The last line of a traceback."""
    lines = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in error.splitlines()]
    errors = [line for line in lines if re.match(r"(?!.*ChildFailed)[\w.]*(Error|Exception)\b", line)]
    return errors[-1] if errors else lines[-1]


def _peaks(folder: Path) -> list[dict[str, int]]:
    """Of every process that allocated on a device, the bytes of its devices together."""
    found = [
        json.loads(path.read_bytes()) for path in sorted(folder.glob("*.json")) if "-times" not in path.name
    ]
    names = {"peak_allocated_bytes": "allocated_bytes", "peak_reserved_bytes": "reserved_bytes"}
    rows = [
        {
            name: sum(device["memory_stats"][f"{what}.all.peak"] for device in process["devices"])
            for name, what in names.items()
        }
        for process in found
    ]
    return [row for row in rows if row["peak_allocated_bytes"]]


def _as_typed(command: list[str]) -> list[str]:
    """Without what is of this machine: where Python, packages and checkouts are."""
    checkouts = str(repositories.folder_of("")) + os.sep
    command = [word.removeprefix(checkouts) for word in command]
    shorter = {PYTHON: "python", TRL: "trl"}
    return [shorter.get(word) or FOLDERS.sub("", word) for word in command]


def _versions(program: Program) -> dict[str, str]:
    ask = f"from importlib.metadata import version; print(*map(version, {list(program.libraries)!r}))"
    name = next(name for name, each in PROGRAMS.items() if each is program)
    done = subprocess.run(
        [PYTHON, "-c", ask], env=environment(name), check=True, capture_output=True, text=True
    )
    return {"torch": version("torch")} | dict(zip(program.libraries, done.stdout.split(), strict=True))


def main() -> int:
    parser = parser_of("benchmarks.virtual_gpu.programs", __doc__)
    parser.add_argument("program", nargs="*")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--gpu", help="default: the one that PROGRAMS says")
    parser.add_argument("--out", type=Path, help="a JSON file; rows that it has are kept or replaced")
    parser.add_argument("--list", action="store_true", help="only the programs, and why any cannot run")
    options = parser.parse_args()
    unknown = set(options.program) - PROGRAMS.keys()
    if unknown:
        raise InputError(
            f"there is no program {', '.join(sorted(unknown))}. There are: {', '.join(PROGRAMS)}."
        )
    order = [(size, name) for size in SIZES for name in PROGRAMS]
    key = itemgetter("size", "program")
    table = GrowingTable(
        options.out, {"benchmark": "programs"}, key, same=(), order=lambda each: order.index(key(each))
    )
    for name in options.program or PROGRAMS:
        if options.list or missing(name):
            print(f"{name}: {missing(name) or 'can run'}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = run(name, options.size, options.gpu or PROGRAMS[name].gpu, Path(folder))
        print(json.dumps(row), flush=True)
        table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
