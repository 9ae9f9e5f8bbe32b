"""Model shapes read without torch: against transformers' own configs and really built models."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harness.architecture.families import FAMILIES
from harness.architecture.model_shape import ModelShape, load_shape, read_shape
from harness.errors import InputError
from harness.napkin.model.layers import (
    attention_matrices,
    block_vectors,
    expert_matrices,
    head_matrix,
    mlp_matrices,
    outer_vectors,
    router_matrix,
)
from harness.recipe.file import find_model_config, list_models

MODELS = list_models()


def parameter_count(shape):
    """Parameters of the model; a tied head counts once."""
    matrices = [*attention_matrices(shape), *mlp_matrices(shape), *expert_matrices(shape)]
    matrices += [router_matrix(shape)] if shape.experts else []
    block = sum(m.elements + m.bias * m.outputs for m in matrices) + sum(
        v.elements for v in block_vectors(shape)
    )
    head = head_matrix(shape, shape.vocab)
    head_elements = 0 if shape.tied else head.elements
    outer = (shape.vocab + shape.positions) * shape.hidden + head_elements + head.bias * head.outputs
    return shape.layers * block + outer + sum(v.elements for v in outer_vectors(shape))


def build(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_there_are_models_to_read():
    assert len(MODELS) >= 20
    assert {load_shape(model).family for model in MODELS} >= {"llama", "mistral", "mixtral", "qwen2", "qwen3"}


@pytest.mark.parametrize("model", MODELS)
def test_parameters_counted_are_those_of_the_built_model(model):
    config = AutoConfig.for_model(**json.loads(find_model_config(model).read_text()))
    assert parameter_count(load_shape(model)) == sum(p.numel() for p in build(config).parameters())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_config_that_says_nothing_means_what_transformers_means(family):
    ours = read_shape({"model_type": family})
    theirs = AutoConfig.for_model(family)
    get = theirs.to_dict().get
    heads = theirs.num_attention_heads
    assert (ours.hidden, ours.layers, ours.heads) == (theirs.hidden_size, theirs.num_hidden_layers, heads)
    assert (ours.vocab, ours.tied) == (theirs.vocab_size, theirs.tie_word_embeddings)
    assert ours.kv_heads == (get("num_key_value_heads") or heads)
    assert ours.head_dim == (get("head_dim") or theirs.hidden_size // heads)
    rope = get("rope_parameters")
    if rope:
        assert ours.rotary_dim == int(ours.head_dim * rope.get("partial_rotary_factor", 1.0))
    kinds = get("layer_types") or []
    windowed = (
        kinds.count("sliding_attention") if kinds else ours.layers * (get("sliding_window") is not None)
    )
    assert ours.sliding_layers == windowed
    small = {"model_type": family, "num_hidden_layers": 1, "n_layer": 1}
    config = AutoConfig.for_model(**small)
    assert parameter_count(read_shape(small)) == sum(p.numel() for p in build(config).parameters())


BIASES = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    {"model_type": "qwen3", "attention_bias": True},
    {"model_type": "gemma2", "attention_bias": True, "tie_word_embeddings": False},
    {"model_type": "gpt_neox", "attention_bias": False, "tie_word_embeddings": True},
    {"model_type": "mistral", "head_dim": 64, "num_key_value_heads": 2},
    {"model_type": "gpt2", "n_inner": 1000},
]


@pytest.mark.parametrize("values", BIASES, ids=lambda values: values["model_type"])
def test_biases_and_odd_sizes(values):
    values = values | {"num_hidden_layers": 2}
    shape = read_shape(values)
    assert parameter_count(shape) == sum(
        p.numel() for p in build(AutoConfig.for_model(**values)).parameters()
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "mamba"}, ["mamba", "llama", "gpt2"]),
        ({}, ["None", "llama"]),
        ({"model_type": "llama", "hidden_size": 0}, ["hidden_size", "0"]),
        ({"model_type": "llama", "hidden_size": "big"}, ["hidden_size", "big"]),
        ({"model_type": "llama", "num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, ["hidden_size", "100"]),
        ({"model_type": "llama", "num_key_value_heads": 5}, ["num_key_value_heads", "5"]),
        ({"model_type": "llama", "hidden_act": "relu2"}, ["relu2", "silu"]),
        ({"model_type": "gpt2", "resid_pdrop": 1.5}, ["resid_pdrop", "1.5"]),
    ],
)
def test_a_config_napkin_cannot_use_is_named(values, words):
    with pytest.raises(InputError) as error:
        read_shape(values, "here.json")
    assert all(word in str(error.value) for word in ["here.json", *words])


def test_models_by_path_folder_and_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    by_folder, by_file = load_shape(str(tmp_path)), load_shape(str(tmp_path / "config.json"))
    assert by_folder == by_file
    assert by_folder.layers == 3
    assert isinstance(load_shape("llama-2-7b"), ModelShape)


def test_a_config_in_the_hugging_face_cache_is_found(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "models--someone--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert load_shape("someone/model").family == "qwen2"


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\xff\xfe", b"{" * 100_000, b'{"model_type": ' + b"1" * 2_000_000]
)
def test_a_file_that_is_no_config_is_one_sentence(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(InputError, match="config"):
        load_shape(str(tmp_path))
    with pytest.raises(InputError, match="no-such-model"):
        load_shape("no-such-model")


def test_reading_a_shape_imports_no_torch():
    code = "import sys, harness.architecture, harness.napkin, harness.hardware; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "harness.hardware.roofline" in done.stdout.split()
    assert "torch" not in done.stdout.split()
