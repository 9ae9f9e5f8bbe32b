"""The programs of others that programs.py runs, and how large."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpu import repositories
from harness.system import PACKAGE

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


SIZES = {"tiny": Size(None, "pythia-14m", 64, 4), "full": Size("llama-3.2-1b", "phi-1_5", 1024, 4)}
STEPS = 2


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
    model: str | None = None
    """What it trains, if that is not what `full` says."""
    litgpt: bool = False
    makes: Callable[[Path], None] | None = None
    """What else it reads, in files beside the folder `rows`, or in it."""
    checkout: str | None = None
    """A repository that it is in: repositories.py."""
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
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
TITAN = ("--module", "llama3", "--config", "llama3_debugmodel", "--training.steps", "2")
UNSLOTH = """
from unsloth import FastLanguageModel
import torch
model, _ = FastLanguageModel.from_pretrained("model", max_seq_length=1024, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=16, use_gradient_checkpointing="unsloth")
ids = torch.ones(2, 1024, dtype=torch.int64, device="cuda")
model(input_ids=ids, labels=ids).loss.backward()
"""


def _deepspeed(stage: int, *more: str) -> Program:
    launched = repositories.deepspeed(PYTHON, stage, *more)
    return Program(
        "completions",
        lambda size: launched([*_trl_words(size), "--max_length", str(size.length)]),
        ("deepspeed", "trl", "transformers", "accelerate"),
        gpus=2,
        beside=True,
    )


def _of_peft(example: str, *words: str) -> Program:
    given = ("--base_model", "model", "--data_path", "rows", "--output_dir", "trained", "--val_set_size", "4")
    command = repositories.script(PYTHON, "peft", f"examples/{example}/{example}.py", *given, *words)
    rows = "texts" if example == "dora_finetuning" else "instructions"
    return Program(rows, command, ("peft", "transformers"), checkout="peft")


def _nano_gpt(*words: str) -> Program:
    command = repositories.nano_gpt(PYTHON, *words)
    made, model = repositories.tokens, "gpt2, 124M"
    return Program("texts", command, ("numpy",), makes=made, checkout="nanoGPT", model=model)


def _of(
    checkout: str, path: str, *words: str, libraries: tuple[str, ...] = ("torchvision",), **more: Any
) -> Program:
    """A file of a checkout with these words."""
    given = {"beside": True, **more}
    command = repositories.script(PYTHON, checkout, path, *words)
    return Program("texts", command, libraries, checkout=checkout, **given)


def _launched(program: Program, gpus: int) -> Program:
    """By torchrun, with a process a GPU."""
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(gpus))
    return replace(program, command=lambda size: [PYTHON, *launch, *program.command(size)[1:]], gpus=gpus)


IMAGENET = _of(
    *("examples", "imagenet/main.py", "-a", "resnet50", "rows", "-b", "32", "--epochs", "1", "-j", "0"),
    makes=repositories.images,
    model="resnet50",
)
DREAMBOOTH = (
    *("--pretrained_model_name_or_path", "model", "--instance_data_dir", "rows", "--output_dir", "trained"),
    *("--instance_prompt", "a photo of sks dog", "--resolution", "512", "--train_batch_size", "1"),
    *("--gradient_accumulation_steps", "1", "--max_train_steps", "2", "--mixed_precision", "bf16"),
)


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
    "trl kto": Program("preferences", _with_length(_trl("kto"))),
    "accelerate launch, ZeRO-2, trl sft": _deepspeed(2),
    "accelerate launch, ZeRO-3, trl sft": _deepspeed(3),
    "accelerate launch, ZeRO-3, offload, trl sft": replace(
        _deepspeed(3, "--offload_optimizer_device", "cpu", "--offload_param_device", "cpu"),
        full=replace(SIZES["full"], layers=4),  # all of it is in the host's memory
        model="llama-3.2-1b, 4 layers",
    ),
    "PEFT examples/olora_finetuning": _of_peft("olora_finetuning"),
    "PEFT examples/dora_finetuning": _of_peft("dora_finetuning", "--use_dora"),
    "nanoGPT train.py": _nano_gpt("--compile=False"),
    "nanoGPT train.py, compiled": _nano_gpt("--compile=True"),
    "PyTorch examples/imagenet, resnet50": IMAGENET,
    "PyTorch examples/imagenet, resnet50, DataParallel": replace(IMAGENET, gpus=2),
    "PyTorch examples/dcgan": _of(
        *("examples", "dcgan/main.py", "--dataset", "fake", "--accel", "--dry-run", "--workers", "0"),
        model="its own",
    ),
    "PyTorch examples/distributed/FSDP2": _launched(
        _of("examples", "distributed/FSDP2/example.py", model="its own"), 2
    ),
    "PyTorch examples/distributed/tensor_parallelism": _launched(
        _of("examples", "distributed/tensor_parallelism/fsdp_tp_example.py", model="its own"), 4
    ),
    "torchvision references/classification, resnet50": _of(
        *("vision", "references/classification/train.py", "--data-path", "rows"),
        *("--model", "resnet50", "--epochs", "1", "-b", "32", "-j", "0"),
        makes=repositories.images,
        model="resnet50",
    ),
    "sentence-transformers training_stsbenchmark": _of(
        *("sentence-transformers", "examples/sentence_transformer/training/sts/training_stsbenchmark.py"),
        libraries=("sentence_transformers", "transformers"),
        makes=repositories.sentences,
        model="distilbert-base",
    ),
    "accelerate examples/by_feature/gradient_accumulation": _of(
        *("accelerate", "examples/by_feature/gradient_accumulation_for_autoregressive_models.py"),
        *("--mixed_precision", "bf16", "--gradient_accumulation_steps", "2", "--per_device_batch_size", "8"),
        libraries=("accelerate", "transformers"),
        beside=False,
        makes=repositories.wikitext,
    ),
    "Lightning's Trainer": Program(
        "texts",
        lambda size: [PYTHON, str(WRITTEN / "lit.py")],
        ("lightning",),
        beside=True,
        model="three layers of 1,024",
    ),
    "diffusers examples/dreambooth, LoRA": _of(
        *("diffusers", "examples/dreambooth/train_dreambooth_lora.py", *DREAMBOOTH),
        libraries=("diffusers", "transformers", "peft", "accelerate"),
        makes=repositories.pictures,
        model="Stable Diffusion of few channels",
    ),
    "LLaMA-Factory, qwen3_lora_sft.yaml": Program(
        "instructions",
        lambda size: [PYTHON, "-m", "llamafactory.cli", "train", "train.yaml"],
        ("llamafactory", "transformers", "peft"),
        beside=True,
        makes=repositories.llama_factory,
        checkout="LLaMA-Factory",
    ),
    "Axolotl, llama-3/lora-1b.yml": Program(
        "instructions",
        lambda size: [PYTHON, "-m", "axolotl.cli.train", "train.yaml"],
        ("axolotl", "transformers", "peft"),
        beside=True,
        makes=repositories.axolotl,
        checkout="axolotl",
    ),
    "Unsloth": Program(
        "texts", lambda size: [PYTHON, "-c", UNSLOTH], ("unsloth", "transformers", "peft"), beside=True
    ),
    "torchtitan, llama3_debugmodel": Program(
        "texts",
        lambda size: [PYTHON, *TORCHRUN, "-m", "torchtitan.train", *TITAN],
        ("torchtitan",),
        beside=True,
        gpus=2,
        model="its debugmodel",
    ),
    "torchtitan 0.2, debug_model.toml": Program(
        "texts",
        lambda size: [PYTHON, *TORCHRUN, "-m", "torchtitan.train", *repositories.titan_words()],
        ("torchtitan",),
        beside=True,
        gpus=2,
        model="its debugmodel",
        makes=repositories.titan,
        checkout="torchtitan",
    ),
}
