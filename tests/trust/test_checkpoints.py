"""Checkpoint folders from anyone: what is damaged in them is a sentence, never a traceback."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from harness.errors import InputError
from harness.measure.observer import Unobserved
from harness.recipe.recipe import Recipe
from harness.training.loop import set_up
from harness.training.model import build_model
from tests.support.tiny import CPU
from tests.support.trust_report import Tried

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(folder)
    return folder


def with_header(change: Callable[[dict[str, Any], str], Any]) -> Callable[[bytes], bytes]:
    """The file with its header changed: `change` gets it and the name of its first tensor."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header, next(name for name in header if name != "__metadata__"))
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return changed


DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2**60 bytes": lambda content: struct.pack("<Q", 2**60) + content[8:],
    "cut in the middle": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "a header that is no JSON": lambda content: content[:8] + b"x" * 100 + content[108:],
    "a tensor of 2**62 bytes": with_header(lambda h, name: h[name].update(data_offsets=[0, 2**62])),
    "a tensor of 2**80 numbers": with_header(lambda h, name: h[name].update(shape=[2**40, 2**40])),
    "a dtype that is none": with_header(lambda h, name: h[name].update(dtype="X9")),
    "a tensor left out": with_header(lambda h, name: h.pop(name)),
    "tensors that overlap": with_header(lambda h, name: h[name].update(data_offsets=[64, 128])),
}


def pretrained(folder: Path, **fields: Any) -> Recipe:
    return Recipe(model=str(folder), weights="pretrained", precision="fp32", seq_len=16, **fields)


def copied(whole: Path, folder: Path) -> Path:
    return Path(shutil.copytree(whole, folder / "model"))


def test_the_whole_one_loads(whole: Path) -> None:
    set_up(pretrained(whole), CPU, Unobserved())


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_weights_are_refused(damage: str, whole: Path, tmp_path: Path, tried: Tried) -> None:
    folder = copied(whole, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(DAMAGED[damage](path.read_bytes()))
    with pytest.raises(InputError, match=r"model: .*model: a file of its weights cannot be read"):
        set_up(pretrained(folder), CPU, Unobserved())
    tried(
        "Checkpoint folders",
        "model.safetensors with a header that lies, is no JSON or leaves something out; cut; empty",
        "exit 2, the folder named",
    )


def test_weights_that_are_missing_are_not_made_up(whole: Path, tmp_path: Path) -> None:
    folder = copied(whole, tmp_path)
    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weights of the model, model\.norm\.weight the first"):
        set_up(pretrained(folder), CPU, Unobserved())
    save_file({}, path, {"format": "pt"})
    with pytest.raises(InputError, match="lacks 12 weights"):
        set_up(pretrained(folder), CPU, Unobserved())


OTHER_FILES: dict[str, dict[str, bytes]] = {
    "an index that is no JSON": {"model.safetensors.index.json": b"{"},
    "an index of nothing": {"model.safetensors.index.json": b"{}"},
    "an index of files that are not there": {
        "model.safetensors.index.json": b'{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'
    },
    "an index that leads out": {
        "model.safetensors.index.json": b'{"metadata": {}, "weight_map": {"a": "../../etc/passwd"}}'
    },
    "a pickle that is none": {"pytorch_model.bin": b"\x80\x02garbage"},
    "a pickle that calls": {"pytorch_model.bin": pickle.dumps(os.getcwd, 2)},
    "an empty pickle": {"pytorch_model.bin": b""},
    "no weights": {},
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_other_damaged_weights_are_refused(name: str, whole: Path, tmp_path: Path, tried: Tried) -> None:
    folder = copied(whole, tmp_path)
    (folder / "model.safetensors").unlink()
    for file, content in OTHER_FILES[name].items():
        (folder / file).write_bytes(content)
    with pytest.raises(InputError, match=r"model: .*model"):
        set_up(pretrained(folder), CPU, Unobserved())
    fault = "an index or a pytorch_model.bin that is damaged, leads out of the folder or calls something"
    tried("Checkpoint folders", fault, "exit 2, the folder named")


TOKENIZERS: dict[str, dict[str, bytes]] = {
    "none": {},
    "no JSON": {"tokenizer.json": b"{"},
    "empty": {"tokenizer.json": b""},
    "another document": {"tokenizer.json": b"[]"},
    "no model": {"tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE"}}'},
    "nested deep": {"tokenizer.json": b"[" * 100_000 + b"]" * 100_000},
    "not UTF-8": {"tokenizer.json": b'{"\xff": 1}'},
    "an unknown class": {"tokenizer_config.json": b'{"tokenizer_class": "Nonesuch"}'},
    "a class that is a number": {"tokenizer_config.json": b'{"tokenizer_class": 7}'},
    "a config that is a list": {"tokenizer_config.json": b"[]"},
    "a config that is no JSON": {"tokenizer_config.json": b"{"},
    "a damaged sentencepiece": {"tokenizer.model": b"\x0a\xff\xff\xff\xff\x0f"},
    "special tokens as a list": {
        "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}',
        "special_tokens_map.json": b"[1]",
    },
    "a vocabulary of numbers": {
        "tokenizer.json": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'
    },
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_damaged_tokenizers_are_refused(name: str, whole: Path, tmp_path: Path, tried: Tried) -> None:
    folder = copied(whole, tmp_path)
    for file, content in TOKENIZERS[name].items():
        (folder / file).write_bytes(content)
    (tmp_path / "text.txt").write_text("some text to train on\n" * 100)
    with pytest.raises(InputError, match=r"model: .*token"):
        set_up(pretrained(folder, data=str(tmp_path / "text.txt")), CPU, Unobserved())
    fault = "tokenizer files that are damaged, empty, of another shape, of an unknown class, or missing"
    tried("Checkpoint folders", fault, "exit 2, the folder named")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json", "anything"])
def test_a_pipe_in_the_folder_is_not_waited_for(file: str, whole: Path, tmp_path: Path, tried: Tried) -> None:
    folder = copied(whole, tmp_path)
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(InputError, match=f"{file}.* not a regular file"):
        set_up(pretrained(folder), CPU, Unobserved())
    if file == "config.json":
        with pytest.raises(InputError, match="not a regular file"):
            build_model(Recipe(model=str(folder)), torch.device("meta"))
    tried("Checkpoint folders", "a pipe in the place of a file", "exit 2 at once, the pipe named")


def test_a_folder_as_deep_as_names_go_is_a_sentence() -> None:
    for model in ("a" * 300, "a/" * 3000, "/" + "b" * 5000, "~" + "c" * 300, "a\0b"):
        with pytest.raises(InputError, match="model: "):
            build_model(Recipe(model=model), torch.device("meta"))
        with pytest.raises(InputError, match="model: "):
            build_model(Recipe(model=model, weights="pretrained"), CPU)


LEARNED = {
    "bert": {"max_position_embeddings": 40},
    "opt": {"max_position_embeddings": 40, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "roberta": {"max_position_embeddings": 42, "pad_token_id": 1},
    "gpt_neo": {"max_position_embeddings": 40, "attention_types": [[["global"], 1]], "num_layers": 1},
}


@pytest.mark.parametrize("family", LEARNED)
def test_no_more_tokens_than_learned_positions(family: str, tmp_path: Path) -> None:
    """Shape-only tensors would not notice; the largest length runs, and one more is refused."""
    values = {**SIZES, **LEARNED[family]}
    if family == "gpt_neo":
        values = {"hidden_size": 32, "vocab_size": 300, "num_heads": 2, **LEARNED[family]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, "is_decoder": True, **values}))
    longest = Recipe(model=str(path), seq_len=40, precision="fp32", attention="eager")
    model = build_model(longest, CPU)
    tokens = torch.full((1, 40), 7)
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 41), 7))
    for device in (CPU, torch.device("meta")):
        with pytest.raises(InputError, match=r"seq_len: 41: .* 40 tokens"):
            build_model(longest.model_copy(update={"seq_len": 41}), device)
