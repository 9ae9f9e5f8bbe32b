"""Checkpoints of zeros, against those that transformers itself writes and loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.architecture.model_id import find_config, shipped_config
from harness.errors import InputError
from harness.zeros import weights
from harness.zeros.checkpoint import stand_in_folder, write_checkpoint
from tests.support.commands import Call

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32}
LLAMA |= {"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
}
GPT2 |= {"n_head": 4, "n_positions": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama, tied, bf16": {**LLAMA, "tie_word_embeddings": True, "dtype": "bfloat16"},
    "llama, fp32": {**LLAMA, "tie_word_embeddings": False},
    "gpt2, torch_dtype": {**GPT2, "torch_dtype": "float16"},
    "a classifier": {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "num_labels": 3},
}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def header(folder: Path) -> dict[str, Any]:
    content = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    return {
        name: (w["dtype"], w["shape"])
        for name, w in json.loads(content[8 : 8 + size]).items()
        if "dtype" in w
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_the_checkpoint_that_transformers_would_write(name: str, tmp_path: Path) -> None:
    import transformers

    config = write_config(tmp_path / "given", CONFIGS[name])
    size_bytes, stands_in = write_checkpoint(config, tmp_path / "zeros")
    assert stands_in
    made = getattr(transformers, CONFIGS[name]["architectures"][0])
    model, loading = made.from_pretrained(tmp_path / "zeros", output_loading_info=True, dtype="auto")
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert all(not weight.any() for weight in model.parameters())
    assert sum(weight.nbytes for weight in model.parameters()) == size_bytes
    model.save_pretrained(tmp_path / "saved")
    assert header(tmp_path / "zeros") == header(tmp_path / "saved")


def test_it_takes_no_place_on_the_disk(tmp_path: Path) -> None:
    """8 billion parameters in files that even a small machine can map, written and looked at as files are."""
    size_bytes, _ = write_checkpoint(find_config("llama-3.1-8b"), tmp_path / "model")
    assert size_bytes == 2 * 8_030_261_248
    found = [path.stat() for path in (tmp_path / "model").glob("model-*-of-00004.safetensors")]
    assert len(found) == 4
    assert size_bytes < sum(file.st_size for file in found) < size_bytes + 2**20
    assert max(file.st_size for file in found) < 4.1 * 2**30
    assert sum(file.st_blocks for file in found) * 512 < 2**20


def test_several_files_are_loaded_as_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(weights, "MOST_OF_A_FILE", 20_000)
    write_checkpoint(write_config(tmp_path / "given", CONFIGS["llama, fp32"]), tmp_path / "zeros")
    assert not (tmp_path / "zeros/model.safetensors").exists()
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "zeros", output_loading_info=True)
    assert not loading["missing_keys"]


def test_the_tokenizer_is_the_one_beside_the_config(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = write_config(tmp_path / "given", {**LLAMA, "eos_token_id": 280, "bos_token_id": 281})
    write_checkpoint(config, tmp_path / "first")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (281, 280)
    assert tokenizer.decode(tokenizer("two words")["input_ids"]) == "two words"
    assert len(tokenizer("two words")["input_ids"]) == 9
    assert "hi" in tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    (tmp_path / "first/notes.txt").write_text("kept")
    (tmp_path / "first/old.bin").write_text("left out")
    assert write_checkpoint(tmp_path / "first/config.json", tmp_path / "second")[1] is False
    again = AutoTokenizer.from_pretrained(tmp_path / "second")
    assert again("two words")["input_ids"] == tokenizer("two words")["input_ids"]
    assert (tmp_path / "second/notes.txt").exists()
    assert not (tmp_path / "second/old.bin").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**LLAMA, "architectures": ["NobodysModel"]}, "is of a NobodysModel"),
        ({**LLAMA, "model_type": "nobodys"}, "cannot build"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantized already"),
        ({"vocab_size": 3}, "cannot build"),
    ],
)
def test_what_cannot_be_made_is_refused(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=says):
        write_checkpoint(write_config(tmp_path / "given", config), tmp_path / "zeros")


def test_the_command(tmp_path: Path, call: Call) -> None:
    def run(*words: str, status: int = 0) -> str:
        ended, out, err = call("checkpoint", *words)
        assert ended == status, err
        return " ".join((out + err).split())

    write_config(tmp_path / "given", LLAMA)
    said = run("given", "--out", "model")
    assert said.startswith("model: 0.1 MiB of zeros, which take no place on the disk. There was no tokenizer")
    assert "is not empty. Give a new folder." in run("given", "--out", "model", status=2)
    assert "no such name in recipes/models" in run("org/nothing", "--out", "other", status=2)


def test_the_cache_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_config(tmp_path / "given", LLAMA)
    folder = stand_in_folder(config)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert stand_in_folder(config) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert len(list(folder.parent.iterdir())) == 1
    write_config(tmp_path / "given", {**LLAMA, "num_hidden_layers": 3})
    assert stand_in_folder(config) != folder


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
        ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("openai-community/gpt2", "gpt2-small"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        # another vocabulary, other sizes, nothing at all
        ("mistralai/Mistral-7B-Instruct-v0.3", None),
        ("meta-llama/Llama-3.2-90B", None),
        ("llama-3.1-8b", None),
        ("org/nothing", None),
    ],
)
def test_an_id_whose_config_harness_has(model: str, found: str | None) -> None:
    path = shipped_config(model)
    assert (None if path is None else path.stem) == found


def test_torch_is_not_changed(tmp_path: Path) -> None:
    config = write_config(tmp_path / "given", CONFIGS["llama, tied, bf16"])
    write_checkpoint(config, tmp_path / "zeros")
    assert torch.get_default_dtype() == torch.float32
    assert torch.empty(1).device.type == "cpu"
