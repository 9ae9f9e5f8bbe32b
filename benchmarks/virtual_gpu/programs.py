"""Programs of others on a virtual GPU, unchanged: the peak of each process, its seconds, every version.

    python -m benchmarks.virtual_gpu.programs [PROGRAM ...] [--size tiny|full] [--out FILE] [--list]

They come as their authors ship them: commands of TRL, accelerate, torchtune and LitGPT from their wheels, and
PEFT's example from a checkout of its repository. What they read is made here (checkpoint.py): nothing is
downloaded. What is not in this environment is looked for where these say:

    PROGRAMS_OF_OTHERS   a folder of packages, of `pip install --no-deps --target FOLDER -r
                         tests/virtual_gpu/programs/others.txt`: torchtune 0.6 wants a torchao that peft
                         refuses, so it stays beside the environment
    PEFT_EXAMPLES        the folder `examples` of a checkout of github.com/huggingface/peft; the committed
                         result is of its commit 5d602fdb
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpu import checkpoint
from harness.errors import InputError
from harness.system import PACKAGE, write_whole

MODELS = PACKAGE.parent / "recipes" / "models"
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
PYTHON = sys.executable
WRITTEN = PACKAGE.parent / "tests" / "virtual_gpu" / "programs"
TRL = str(Path(PYTHON).with_name("trl"))


@dataclass(frozen=True)
class Size:
    """How large a program is run."""

    model: str | None
    """A name in recipes/models; None: two layers of 64."""
    litgpt_model: str
    length: int
    """Tokens of a row."""
    batch: int
    layers: int | None = None
    """Of the model, if not all."""


SIZES = {
    "tiny": Size(None, "pythia-14m", 64, 4),
    "full": Size("llama-3.2-1b", "phi-1_5", 1024, 4),
}
STEPS = 2
SAID = re.compile(r"(?:GPU peak memory|Memory Used)[^|\n]*")
"""What programs themselves print of their memory."""
FOLDERS = re.compile(r"^/.*/(?:site-packages/|examples/|(?=tests/))")


@dataclass(frozen=True)
class Published:
    """What a program said of its memory when its authors ran it, on a GPU."""

    source: str
    said: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What is run: words of a command, in a folder that has `model` and `rows`."""

    rows: str
    """Their kind, in checkpoint.py."""
    command: Callable[[Size], list[str]]
    libraries: tuple[str, ...] = ("trl", "transformers", "peft", "accelerate")
    gpu: str = "h100"
    gpus: int = 1
    """As many processes, unless `world_size` says that rank 0 runs alone."""
    world_size: int | None = None
    beside: bool = False
    """Whether it needs PROGRAMS_OF_OTHERS."""
    full: Size = SIZES["full"]
    litgpt: bool = False
    published: Published | None = None

    def size(self, name: str) -> Size:
        return self.full if name == "full" else SIZES[name]


def _trl(kind: str, *words: str) -> Callable[[Size], list[str]]:
    return lambda size: [TRL, kind, *_trl_words(size), *words]


def _trl_words(size: Size) -> list[str]:
    return [
        *("--model_name_or_path", "model", "--dataset_name", "rows", "--output_dir", "trained"),
        *("--max_steps", str(STEPS), "--per_device_train_batch_size", str(size.batch)),
        *("--dtype", "bfloat16", "--bf16", "true", "--report_to", "none", "--save_strategy", "no"),
    ]


def _with_length(command: Callable[[Size], list[str]], times: int = 1) -> Callable[[Size], list[str]]:
    """The rows are cut to it; but a reward model's trainer leaves out what is longer: twice is enough."""
    return lambda size: [*command(size), "--max_length", str(times * size.length)]


def _grpo(size: Size) -> list[str]:
    words = ("--num_generations", "4", "--max_completion_length", str(size.length // 4))
    return [*_trl("grpo", *words, "--reward_funcs", "get_soft_overlong_punishment")(size)]


def _fsdp2(size: Size) -> list[str]:
    """TRL's own configuration, with two processes instead of its eight."""
    import trl

    configuration = Path(trl.__file__).parent / "accelerate_configs" / "fsdp2.yaml"
    launch = [PYTHON, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
    words = [*_trl_words(size), "--max_length", str(size.length)]
    return [*launch, "--num_processes", "2", "-m", "trl.scripts.sft", *words]


def _by_hand(*launch: str) -> Callable[[Size], list[str]]:
    """A loop over FSDP2 as a user writes it."""
    words = (*launch, str(WRITTEN / "llama_fsdp2.py"), "model/config.json")
    return lambda size: [PYTHON, *words, str(size.batch), str(size.length)]


def _peft_example(size: Size) -> list[str]:
    """examples/sft/train.py, as its run_peft.sh calls it; QLoRA."""
    program = Path(os.environ["PEFT_EXAMPLES"]) / "sft" / "train.py"
    return [
        *(PYTHON, str(program), "--model_name_or_path", "model", "--dataset_name", "rows"),
        *("--splits", "train,test", "--max_length", str(size.length), "--max_steps", str(STEPS)),
        *("--per_device_train_batch_size", str(size.batch), "--bf16", "True", "--packing", "False"),
        *("--gradient_checkpointing", "True", "--use_reentrant", "True", "--learning_rate", "1e-4"),
        *("--use_peft_lora", "True", "--lora_r", "8", "--lora_alpha", "16", "--lora_dropout", "0.1"),
        *("--lora_target_modules", "all-linear", "--use_4bit_quantization", "True"),
        *("--use_nested_quant", "True", "--bnb_4bit_compute_dtype", "bfloat16"),
        *("--output_dir", "trained", "--report_to", "none", "--save_strategy", "no"),
    ]


def _torchtune(configuration: str) -> Callable[[Size], list[str]]:
    """Its own recipe with its own configuration, on files and data that are here."""
    tune = [PYTHON, "-m", "torchtune._cli.tune", "run", "lora_finetune_single_device"]
    return lambda size: [*tune, "--config", configuration, *_torchtune_words(size)]


def _torchtune_words(size: Size) -> list[str]:
    changed = {
        "output_dir": "trained",
        "checkpointer.checkpoint_dir": "model",
        "checkpointer.checkpoint_files": "[model.safetensors]",
        "tokenizer.path": "model/tokenizer.model",
        "tokenizer.max_seq_len": size.length,
        "dataset._component_": "torchtune.datasets.alpaca_dataset",
        "dataset.source": "json",
        "dataset.data_files": "rows/rows.json",
        "batch_size": size.batch,
        "gradient_accumulation_steps": 1,
        "max_steps_per_epoch": STEPS,
        "save_adapter_weights_only": True,
    }
    if size.model is None:  # the builder under that of the configuration takes sizes
        changed |= {
            "model._component_": "torchtune.models.llama3_1.lora_llama3_1",
            "model.vocab_size": TINY["vocab_size"],
            "model.num_layers": TINY["num_hidden_layers"],
            "model.num_heads": TINY["num_attention_heads"],
            "model.num_kv_heads": TINY["num_key_value_heads"],
            "model.embed_dim": TINY["hidden_size"],
            "model.intermediate_dim": TINY["intermediate_size"],
            "model.max_seq_len": 131072,
        }
    return [f"{name}={value}" for name, value in changed.items()]


def _litgpt(size: Size) -> list[str]:
    return [
        *(PYTHON, "-m", "litgpt", "finetune_lora", "model", "--out_dir", "trained"),
        *("--precision", "bf16-true", "--data", "JSON", "--data.json_path", "rows/rows.json"),
        *("--data.val_split_fraction", "0.1", "--data.num_workers", "0"),
        *("--train.max_steps", str(STEPS), "--train.max_seq_length", str(size.length)),
        *("--train.micro_batch_size", str(size.batch), "--train.global_batch_size", str(size.batch)),
        *("--train.lr_warmup_steps", "1", "--eval.max_new_tokens", "4", "--eval.max_iters", "1"),
    ]


LORA = ("--use_peft", "--lora_target_modules", "all-linear", "--learning_rate", "1e-4")
_EIGHT_B = replace(SIZES["full"], model="llama-3.1-8b", batch=1)
PROGRAMS: dict[str, Program] = {
    "trl sft": Program("completions", _with_length(_trl("sft")), gpu="h200"),
    "trl sft, LoRA": Program("completions", _with_length(_trl("sft", *LORA)), full=_EIGHT_B),
    "trl sft, packing": Program("texts", _with_length(_trl("sft", "--packing"))),
    "trl dpo": Program("preferences", _with_length(_trl("dpo"))),
    "trl reward": Program("preferences", _with_length(_trl("reward"), times=2)),
    "trl grpo": Program("prompts", _grpo),
    "accelerate launch, FSDP2, trl sft": Program("completions", _fsdp2, gpus=2),
    "FSDP2 loop, torchrun": Program(
        "texts", _by_hand("-m", "torch.distributed.run", "--nproc-per-node", "2"), ("transformers",), gpus=2
    ),
    "FSDP2 loop, rank 0 of 8": Program(
        "texts",
        _by_hand(),
        ("transformers",),
        gpus=8,
        world_size=8,
        full=replace(SIZES["full"], model="llama-3.1-8b", batch=2, length=4096),
    ),
    "PEFT examples/sft, QLoRA": Program("texts", _peft_example),
    "tune run lora_finetune_single_device": Program(
        "instructions",
        _torchtune("llama3_1/8B_lora_single_device"),
        ("torchtune", "torchao"),
        beside=True,
        full=replace(_EIGHT_B, batch=2),
    ),
    "tune run lora_finetune_single_device, 3B": Program(
        "instructions",
        _torchtune("llama3_2/3B_lora_single_device"),
        ("torchtune", "torchao"),
        beside=True,
        gpu="a100-80gb",
        full=replace(_EIGHT_B, model="llama-3.2-3b", batch=4, length=512),
        published=Published(
            "torchtune, docs/source/tutorials/e2e_flow.rst, after model init (run of December 2024)",
            (
                "GPU peak memory allocation: 6.21 GiB",
                "GPU peak memory reserved: 6.27 GiB",
                "GPU peak memory active: 6.21 GiB",
            ),
        ),
    ),
    "litgpt finetune_lora": Program(
        "instructions",
        _litgpt,
        ("litgpt", "lightning"),
        beside=True,
        litgpt=True,
        gpu="a100-40gb",
        full=replace(SIZES["full"], length=1044),
        published=Published(
            "litgpt, tutorials/resource-tables.md, October 2023; profiles/published has that day's code",
            ("Memory Used: 10.68 GB",),
        ),
    ),
}


def model_config(size: Size) -> dict[str, Any]:
    """The contents of a config.json."""
    config = TINY if size.model is None else json.loads((MODELS / f"{size.model}.json").read_bytes())
    return config if size.layers is None else config | {"num_hidden_layers": size.layers}


def missing(name: str) -> str | None:
    """Why a program cannot run here; None: it can."""
    program = PROGRAMS[name]
    if program.beside and not Path(os.environ.get("PROGRAMS_OF_OTHERS", "?"), program.libraries[0]).exists():
        return f"{program.libraries[0]} is not in the folder that PROGRAMS_OF_OTHERS names"
    if program.command is _peft_example and not Path(os.environ.get("PEFT_EXAMPLES", "?"), "sft").exists():
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


def environment(name: str) -> dict[str, str]:
    """Of the process that runs a program."""
    made = dict(os.environ)
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
    if done.returncode:
        raise InputError(f"{name}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "program": name,
        "size": size,
        "gpu": gpu,
        "command": " ".join(["harness", "emulate", *options, "--", *_as_typed(command)]),
        "model": program.size(size).litgpt_model if program.litgpt else program.size(size).model or "tiny",
        "versions": _versions(program),
        "processes": _peaks(statistics),
        "processor_s": round(used, 1),
        "said": [" ".join(line.split()) for line in SAID.findall(done.stdout + done.stderr)],
        "published": asdict(program.published) if program.published and size == "full" else None,
    }


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.virtual_gpu.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    for name in options.program or PROGRAMS:
        if options.list or missing(name):
            print(f"{name}: {missing(name) or 'can run'}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = run(name, options.size, options.gpu or PROGRAMS[name].gpu, Path(folder))
        print(json.dumps(row), flush=True)
        if options.out is not None:
            _keep(row, options.out)
    return 0


def _keep(row: dict[str, Any], path: Path) -> None:
    rows = json.loads(path.read_bytes())["rows"] if path.exists() else []
    found = {(each["size"], each["program"]): each for each in [*rows, row]}
    order = [(size, name) for size in SIZES for name in PROGRAMS]
    rows = [found[key] for key in order if key in found]
    write_whole(path, json.dumps({"benchmark": "programs", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
