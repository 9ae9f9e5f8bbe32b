"""The commands of docs/questions.md and docs/ten-questions.md, run anew: what each prints goes into
docs/data/questions.json.

    python -m benchmarks.questions [QUESTION ...] [--old PYTHON --new PYTHON]
    python -m pages.questions

`versions` holds two environments against each other and wants their interpreters; without them what is in
the file stays. So do those about a program of one's own without PyTorch's CUDA build, for a virtual GPU. All
run on the CPU, in a folder of their own.
"""

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import parser_of
from harness.system import PACKAGE, provenance, write_whole
from harness.virtual_gpu import why_not

ROOT = PACKAGE.parent
OWN_SCRIPTS = ROOT / "benchmarks" / "own_scripts"
RESULTS = ROOT / "docs" / "data" / "questions.json"
ANSWERS = (0, 3, 5)
"""Statuses: done; memory ran out; a peak grew by more than --fail-above."""
TEXTS, SHORTEST, LONGEST = 1000, 5, 4000


def first_paragraph(printed: str) -> str:
    """The verdict; tables follow it."""
    return printed.partition("\n\n")[0]


def but_the_tables(printed: str) -> str:
    """The verdict, and how fast a step is."""
    speed = [line for line in printed.splitlines() if "tokens/s" in line]
    return "\n".join([first_paragraph(printed), *speed[:1]])


def between_steps(printed: str) -> str:
    """What a run says of its evaluation and its checkpoint, its last words but for the folder."""
    return "evaluation of" + printed.partition("\nevaluation of")[2].partition("\nrun folder")[0]


def of_checkpoint(printed: str) -> str:
    """The sentence on it."""
    return "checkpoint" + first_paragraph(printed).partition("\ncheckpoint")[2]


def but_the_folder(printed: str) -> str:
    """All of a sweep's answer but where it lies, last."""
    return printed.partition("\nsweep folder")[0].rstrip()


TEN = "ten-questions"
MESSAGE = """\
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64
GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 22.61 GiB memory in use. Of the
allocated memory 19.71 GiB is allocated by PyTorch, and 2.41 GiB is reserved by PyTorch but unallocated. If
reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid
fragmentation.
"""


def whole(printed: str) -> str:
    """All of it."""
    return printed.rstrip()


def of_a_program(printed: str) -> str:
    """What a watched program's memory is at the peak, and the verdict; the rest has this machine's times."""
    _, _, found = printed.partition("\nmemory at the peak")
    table, _, rest = found.partition("\ndevice:")
    return f"memory at the peak{table}\nthe program: {rest.partition('the program: ')[2]}".partition(
        "\nrun folder"
    )[0].rstrip()


def of_the_tries(printed: str) -> str:
    """The table of a search for the largest value, and its end."""
    lines = printed.partition("\nrun folders")[0].splitlines()
    title = next(index for index, line in enumerate(lines) if line.strip() == "h100")
    return "\n".join(lines[title + 1 :]).strip("\n")


@dataclass(frozen=True)
class Question:
    """Commands, run one after the other, and what is shown of the last one's output."""

    commands: tuple[str, ...]
    shown: Callable[[str], str] = whole
    page: str = "questions"
    script: str = ""
    """Of benchmarks/own_scripts, that the commands run on a virtual GPU."""


EVALUATION = (
    "harness simulate llama-3.1-8b-lora seq_len=1024 hardware=a100-80gb --phases train,eval --eval-batches 20"
)
DIVIDED = "harness simulate llama-3.1-8b-full-bf16 seq_len=1024 parallel=fsdp dp_shard=8 hardware=h100"
PRICES = " ".join(
    f"--price {price}"
    for price in (
        *("rtx-4090=0.35", "l4=0.4", "l40s=0.86", "a100-40gb=1.3", "a100-80gb=1.6", "h100=2.5", "h200=3.5"),
        "b200=5",
    )
)
SEVENTY = (
    "llama-3.1-8b-full-bf16 model=llama-3.1-70b seq_len=4096 parallel=fsdp dp_shard=8 "
    "gradient_checkpointing=true hardware=h100"
)
TOGGLES = (
    "harness sweep llama-3.1-8b-lora seq_len=4096 gradient_checkpointing=true,false "
    "loss=standard,fused_linear attention=sdpa,eager quantization=none,nf4 hardware=h100"
)
QUESTIONS = {
    "qlora-14b": Question(
        ("harness fit llama-3.1-8b-qlora model=qwen3-14b seq_len=4096 hardware=rtx-4090",), page=TEN
    ),
    "gemma-27b": Question(("harness fit llama-3.1-8b-lora model=gemma-3-27b hardware=h100",), page=TEN),
    "cheapest": Question((f"harness hardware llama-3.1-8b-lora seq_len=8192 {PRICES}",), page=TEN),
    "cheapest-best": Question(
        (f"harness hardware llama-3.1-8b-lora seq_len=8192 --best {PRICES}",), page=TEN
    ),
    "own-script": Question(
        ("harness watch --gpu a100-80gb -- python train.py",), of_a_program, TEN, "train.py"
    ),
    "message": Question(("harness snapshot show --message oom.txt",), page=TEN),
    "seventy": Question((f"harness fit {SEVENTY}",), page=TEN),
    "seventy-offload": Question((f"harness simulate {SEVENTY} cpu_offload=true",), but_the_tables, TEN),
    "seventy-16": Question(
        (f"harness simulate {SEVENTY.replace('dp_shard=8', 'dp_shard=16')}",), but_the_tables, TEN
    ),
    "toggles": Question((TOGGLES,), but_the_folder, TEN),
    "dpo-script": Question(
        ("harness watch --gpu h100 --fit BS=16..64 -- python dpo.py",), of_the_tries, TEN, "dpo.py"
    ),
    "dpo": Question(("harness fit llama-3.1-8b-lora task=dpo hardware=h100",), page=TEN),
    "dpo-full": Question(
        ("harness fit llama-3.1-8b-full-bf16 task=dpo gradient_checkpointing=true hardware=h100",), page=TEN
    ),
    "gate": Question(
        (
            "harness simulate tinyllama-lora --out before",
            "harness simulate tinyllama-lora micro_batch_size=5 --out after",
            "harness diff before after --fail-above 5%",
        ),
        page=TEN,
    ),
    "evaluation": Question((EVALUATION,), first_paragraph),
    "checkpoint": Question(
        ("harness simulate llama-3.2-1b-bf16 hardware=rtx-4090 --phases train,save",), first_paragraph
    ),
    "measured": Question(
        ("harness run smoke steps=2 --device cpu --phases train,eval,save --eval-batches 100",), between_steps
    ),
    "evaluation-of-ranks": Question((f"{DIVIDED} --phases train,eval --eval-batches 4",), first_paragraph),
    "checkpoint-in-parts": Question((f"{DIVIDED} --phases train,save",), of_checkpoint),
    "checkpoint-whole": Question((f"{DIVIDED} --phases train,save --full-state-dict",), of_checkpoint),
    "lengths": Question(
        ("harness fit smoke seq_len=4096 micro_batch_size=4 --memory 1GiB --data texts.jsonl",)
    ),
    "versions": Question(("harness diff qwen2.5-7b-lora --python old/bin/python --python new/bin/python",)),
    "runs": Question(
        (
            "harness simulate llama-3.2-1b-bf16 --out before",
            "harness simulate llama-3.2-1b-bf16 attention=eager --out after",
            "harness diff before after",
        )
    ),
}
"""By the name of the part of the page."""


def ask(question: Question, environments: dict[str, Path]) -> str:
    """What is shown of its output. `environments`: folders by the name that the commands call them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, environment in environments.items():
            Path(folder, name).symlink_to(environment)
        if question.script:
            Path(folder, question.script).write_text(script(question), encoding="utf-8")
        Path(folder, "texts.jsonl").write_text(_texts(), encoding="utf-8")
        Path(folder, "oom.txt").write_text(MESSAGE.replace("\n", " "), encoding="utf-8")
        printed = ""
        for command in question.commands:
            printed = _printed(command, Path(folder), of_a_program=bool(question.script))
    return question.shown(printed)


def script(question: Question) -> str:
    """What it says."""
    return (OWN_SCRIPTS / question.script).read_text(encoding="utf-8")


def _printed(command: str, folder: Path, *, of_a_program: bool = False) -> str:
    words = [sys.executable, "-m", *shlex.split(command)]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    surroundings = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", "HF_HUB_OFFLINE": "1"}
    if of_a_program:  # whose own python is this one
        surroundings["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    else:  # another question may have left times of few layers there, which differ by up to a thousandth
        surroundings["HARNESS_CACHE"] = str(folder / ".cache")
    done = subprocess.run(words, cwd=folder, env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode not in ANSWERS:
        raise SystemExit(f"{command}: status {done.returncode}: {done.stderr[-4000:]}")
    return "\n".join(line.rstrip() for line in (done.stderr if of_a_program else done.stdout).splitlines())


def _texts() -> str:
    """Lines of JSON: texts whose lengths are spread as those of instructions are, a few of them very long."""
    drawn = random.Random(0)
    lengths = (round(drawn.lognormvariate(5, 1)) for _ in range(TEXTS))
    return "".join(
        json.dumps({"text": "x" * min(LONGEST, max(SHORTEST, length))}) + "\n" for length in lengths
    )


def main() -> None:
    parser = parser_of("benchmarks.questions", __doc__)
    parser.add_argument("questions", nargs="*", help=f"of {', '.join(QUESTIONS)}; default: all")
    parser.add_argument("--old", type=Path, help="an interpreter, of an environment with older releases")
    parser.add_argument("--new", type=Path, help="another one, with newer releases")
    given = parser.parse_args()
    known: dict[str, Any] = json.loads(RESULTS.read_bytes())["shown"] if RESULTS.exists() else {}
    environments = {
        name: python.absolute().parents[1] for name in ("old", "new") if (python := getattr(given, name))
    }
    for name in given.questions or QUESTIONS:
        here = why_not() is None if QUESTIONS[name].script else True
        if here and (name != "versions" or len(environments) == 2):
            known[name] = ask(QUESTIONS[name], environments)
            print(f"{name}:\n{known[name]}\n", flush=True)
    document = {
        "benchmark": "questions",
        "shown": {name: known[name] for name in QUESTIONS if name in known},
        "provenance": provenance(),
    }
    write_whole(RESULTS, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
