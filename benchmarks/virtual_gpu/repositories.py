"""Programs of others that come in repositories, and what they read besides a checkpoint and rows of text.

REPOSITORIES_OF_OTHERS is a folder of checkouts, each under the name of its repository: nanoGPT, peft,
axolotl, diffusers, LLaMA-Factory, examples (PyTorch's), vision, sentence-transformers, accelerate, torchtitan
(v0.2.2, which PyTorch 2.13 can run). What a program imports is in PROGRAMS_OF_OTHERS; for axolotl and
LLaMA-Factory the releases of transformers, peft and others that they pin, in a folder for each.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

from benchmarks.virtual_gpu.checkpoint import rows, tokenizer
from harness.system import parse_yaml

Command = Callable[..., list[str]]
"""Of a program's Size."""


def folder_of(repository: str) -> Path:
    return Path(os.environ.get("REPOSITORIES_OF_OTHERS", "?"), repository)


def script(python: str, repository: str, path: str, *words: str) -> Command:
    """A file of a checkout with these words."""
    return lambda size: [python, str(folder_of(repository) / path), *words]


def nano_gpt(python: str, *words: str) -> Command:
    """train.py with its own sizes: GPT-2's 124 million parameters, 12 rows of 1024 tokens."""
    changed = (
        "--dataset=rows --max_iters=2 --eval_iters=1 --eval_interval=100 --gradient_accumulation_steps=2"
    )
    return script(python, "nanoGPT", "train.py", *changed.split(), *words)


def deepspeed(python: str, stage: int, *more: str) -> Callable[[list[str]], list[str]]:
    """TRL's own configuration of accelerate, with two processes instead of its eight."""
    import trl

    configuration = Path(trl.__file__).parent / "accelerate_configs" / f"zero{stage}.yaml"
    launch = [python, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
    return lambda words: [*launch, "--num_processes", "2", *more, "-m", "trl.scripts.sft", *words]


def titan_words() -> list[str]:
    """Its own configuration for trying it, and two steps."""
    configuration = folder_of("torchtitan") / "torchtitan/models/llama3/train_configs/debug_model.toml"
    return ["--job.config_file", str(configuration), "--training.steps", "2"]


# ---- what they read, in a folder `rows` unless they want it elsewhere


def tokens(folder: Path) -> None:
    """nanoGPT's: the numbers of tokens, in 16 bits, under data/ of its own folder, from which it starts."""
    import numpy

    made = numpy.random.default_rng(0).integers(0, 50257, 1 << 16).astype(numpy.uint16)
    place = folder.parent / "data" / "rows"
    place.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        made.tofile(place / f"{name}.bin")
    for path in ("configurator.py", "model.py"):
        (folder.parent / path).write_bytes((folder_of("nanoGPT") / path).read_bytes())


def images(folder: Path) -> None:
    """Of eight classes, as torchvision's ImageFolder reads them."""
    import numpy
    from PIL import Image

    random = numpy.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(64):
            path = folder / split / f"kind{number % 8}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (256, 256, 3), dtype=numpy.uint8)
            Image.fromarray(pixels).save(path)


def sentences(folder: Path) -> None:
    """The benchmark's pairs with scores, and distilbert-base, at the places that the program names."""
    from transformers import DistilBertConfig

    place = folder.parent / "sentence-transformers" / "stsb"
    place.mkdir(parents=True)
    row = {"sentence1": "A plane is taking off.", "sentence2": "An air plane is taking off.", "score": 1.0}
    for split in ("train", "validation", "test"):
        (place / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row | {'score': 0.5})}\n" * 32)
    model = folder.parent / "distilbert" / "distilbert-base-uncased"
    DistilBertConfig(architectures=["DistilBertForMaskedLM"]).save_pretrained(model)
    tokenizer({}, model)


def wikitext(folder: Path) -> None:
    """500 rows of text, and `model`, at the places that the program names."""
    place = folder.parent / "Salesforce" / "wikitext"
    rows("texts", place, count=500)
    files = [{"split": "train", "path": "train.jsonl"}, {"split": "validation", "path": "test.jsonl"}]
    said = {"configs": [{"config_name": "wikitext-2-v1", "data_files": files}]}
    (place / "README.md").write_text(f"---\n{json.dumps(said)}\n---\n")
    model = folder.parent / "HuggingFaceTB" / "SmolLM-360M"
    model.parent.mkdir()
    model.symlink_to(folder.parent / "model")


def pictures(folder: Path) -> None:
    """Some in one folder, and a Stable Diffusion of few channels as `model`."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from PIL import Image
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        Image.new("RGB", (512, 512), (number, 0, 0)).save(folder / f"{number}.jpg")
    words = folder.parent / "words"
    words.mkdir(exist_ok=True)
    letters = [
        "<|startoftext|>",
        "<|endoftext|>",
        *(chr(n) + end for n in range(97, 123) for end in ("", "</w>")),
    ]
    (words / "vocab.json").write_text(json.dumps({letter: n for n, letter in enumerate(letters)}))
    (words / "merges.txt").write_text("#version: 0.2\n")
    channels = (128, 256)
    blocks = {"block_out_channels": channels, "layers_per_block": 1, "norm_num_groups": 32}
    text = CLIPTextConfig(
        vocab_size=len(letters), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    with torch.device("cpu"):
        made = StableDiffusionPipeline(
            vae=AutoencoderKL(
                down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
                latent_channels=4, **blocks,
            ),
            text_encoder=CLIPTextModel(text),
            tokenizer=CLIPTokenizer(
                str(words / "vocab.json"), str(words / "merges.txt"), model_max_length=77
            ),
            unet=UNet2DConditionModel(
                sample_size=256, cross_attention_dim=64, attention_head_dim=8,
                down_block_types=["CrossAttnDownBlock2D", "DownBlock2D"],
                up_block_types=["UpBlock2D", "CrossAttnUpBlock2D"], **blocks,
            ),
            scheduler=DDPMScheduler(),
            safety_checker=None,
            feature_extractor=None,
        )  # fmt: skip
    made.save_pretrained(folder.parent / "model")


def llama_factory(folder: Path) -> None:
    """examples/train_lora/qwen3_lora_sft.yaml with the model and rows that are here, and two steps."""
    place = folder.parent
    (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    text = (folder_of("LLaMA-Factory") / "examples/train_lora/qwen3_lora_sft.yaml").read_text()
    changed = {
        "model_name_or_path": "model", "dataset": "rows", "template": "empty", "output_dir": "trained",
        "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "max_samples": 16,
    }  # fmt: skip
    lines = [f"{name}: {value}" for name, value in changed.items()]
    kept = [line for line in text.splitlines() if line.partition(":")[0] not in changed]
    more = ["dataset_dir: rows", "max_steps: 2", "save_strategy: 'no'"]
    kept = [line for line in kept if not line.startswith("num_train_epochs")]
    (place / "train.yaml").write_text("\n".join([*kept, *lines, *more]) + "\n")


def axolotl(folder: Path) -> None:
    """examples/llama-3/lora-1b.yml with the model and rows that are here, and without flash-attn."""
    path = folder_of("axolotl") / "examples/llama-3/lora-1b.yml"
    made = parse_yaml(path.read_text(), str(path))
    made |= {
        "base_model": "model",
        "attn_implementation": "sdpa",
        "output_dir": "trained",
        "max_steps": 2,
        "val_set_size": 0.0,
    }
    made["datasets"] = [{"path": "rows/train.jsonl", "type": "alpaca", "ds_type": "json"}]
    made["special_tokens"] = {"pad_token": "<|finetune_right_pad_id|>"}
    made.pop("num_epochs", None)
    for name in ("hub_model_id", "evals_per_epoch", "saves_per_epoch"):
        made.pop(name, None)
    made["dataset_prepared_path"] = "prepared"
    (folder.parent / "train.yaml").write_text(json.dumps(made))


def titan(folder: Path) -> None:
    """Its own tokenizer and rows of text, at the places that the configuration names."""
    place = folder.parent / "tests" / "assets"
    place.mkdir(parents=True)
    (place / "tokenizer").symlink_to(folder_of("torchtitan") / "tests" / "assets" / "tokenizer")
    rows("texts", place / "c4_test", count=500, length=1024)
