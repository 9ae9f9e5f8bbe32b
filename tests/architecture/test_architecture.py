"""Model shapes read without torch: against transformers' own configs and really built models. A model config
that cannot be built from is one sentence with the field, its value and what to write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from harness.architecture.config_file import check_counts, read_config
from harness.architecture.family import family_defaults
from harness.architecture.layers import outer_parts, parts_of
from harness.architecture.model_shape import ModelShape, load_shape, read_shape
from harness.errors import InputError
from harness.recipe.file import find_model_config, list_models
from harness.recipe.recipe import Recipe
from harness.training.model import build_model
from tests.support.places import LLAMA
from tests.support.tiny import CPU

MODELS = list_models()
PUBLISHED = json.loads((Path(__file__).parents[2] / "benchmarks/napkin_models.json").read_text())


def parameter_count(shape):
    """Parameters of the model; a tied head counts once."""
    blocks = sum(b.count * sum(part.elements for part in parts_of(shape, b)) for b in shape.blocks)
    return blocks + sum(part.elements for part in outer_parts(shape))


def build(config):
    with torch.device("meta"):
        sees = hasattr(config, "vision_config")
        return (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)


def test_there_are_models_to_read():
    assert len(MODELS) >= 20
    assert {load_shape(model).family for model in MODELS} >= {"llama", "mistral", "mixtral", "qwen2", "qwen3"}


UNUSUAL = {"zamba2-2.7b": 0.12, "gpt-neo-1.3b": 0.01, "starcoder-1b": 0.01}
"""Zamba2 shares a block of attention among its layers of Mamba-2, which is left out."""


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_of_any_family_are_about_those_of_the_built_model(name):
    built = sum(p.numel() for p in build(AutoConfig.for_model(**PUBLISHED[name])).parameters())
    assert parameter_count(read_shape(PUBLISHED[name])) == pytest.approx(built, rel=UNUSUAL.get(name, 0.015))


FAMILIES = [
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "phi", "gpt2", "gpt_neox"),
]
FAMILIES += [
    *("qwen3_moe", "granite", "olmo2", "gemma3_text", "starcoder2", "deepseek_v2", "qwen3_next", "glm4"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_says_nothing_means_what_transformers_means(family):
    ours, theirs = read_shape({"model_type": family}), AutoConfig.for_model(family)
    get, heads = theirs.to_dict().get, theirs.num_attention_heads
    assert (ours.hidden, ours.layers, ours.heads) == (theirs.hidden_size, theirs.num_hidden_layers, heads)
    assert (ours.vocab, ours.tied) == (theirs.vocab_size, theirs.tie_word_embeddings)
    assert ours.kv_heads == (get("num_key_value_heads") or heads)
    if not ours.kv_rank:
        assert ours.head_dim == (get("head_dim") or theirs.hidden_size // heads)
    kinds = get("layer_types") or []
    if kinds:
        for named, mixer in (("sliding_attention", "sliding"), ("linear_attention", "delta")):
            assert sum(b.count for b in ours.blocks if b.mixer == mixer) == kinds.count(named)


def test_every_family_of_the_installed_transformers_has_its_defaults_or_none():
    """Of those that transformers trains as causal language models, nearly all are found in its source."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    found = [family for family in CAUSAL if family_defaults(family)]
    assert len(found) > 0.9 * len(CAUSAL)
    assert family_defaults("no-such-family") == {}
    assert family_defaults("../llama") == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, ["None", "llama"]),
        ({"model_type": "no-such-family"}, ["hidden_size", "None"]),
        ({"model_type": "llama", "hidden_size": 0}, ["hidden_size", "0"]),
        ({"model_type": "llama", "hidden_size": "big"}, ["hidden_size", "big"]),
        ({"model_type": "llama", "num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"model_type": "llama", "num_key_value_heads": 5}, ["num_key_value_heads", "5"]),
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
    "content",
    [b"", b"{", b"[1]", b'"a"', b"\xff\xfe", b"{" * 100_000, b'{"model_type": ' + b"1" * 2_000_000],
    ids=lambda content: repr(content[:9]),
)
def test_a_file_that_is_no_config_is_one_sentence(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match="config"):
        load_shape(str(tmp_path))
    assert refused(path).startswith(f"model: {path}")
    with pytest.raises(InputError, match="no-such-model"):
        load_shape("no-such-model")


HOSTILE = [0, -1, 3, 1.5, "x", "M*", [], ["x"], [1, "a", None], {}, True, None, 10**6, 10**12, "auto"]
FIELDS = ["layer_types", "attn_layer_period", "expert_layer_period", "full_attention_interval", "num_experts"]
FIELDS += ["sliding_window", "sliding_window_pattern", "hybrid_override_pattern", "head_dim", "text_config"]


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(PUBLISHED)))
def test_a_broken_config_is_read_or_refused_in_a_sentence(data, name):
    config = dict(PUBLISHED[name])
    fields = st.sampled_from(sorted({*config, *FIELDS} - {"model_type"}))
    for field in data.draw(st.lists(fields, max_size=3)):
        config[field] = data.draw(st.sampled_from(HOSTILE))
    shape, refused = None, ""
    try:
        shape = read_shape(config, "here.json")
    except InputError as error:
        refused = str(error)
    if shape is None:
        assert "here.json" in refused
    else:
        assert sum(block.count for block in shape.blocks) == shape.layers
        assert parameter_count(shape) > 0


LLAMA: dict[str, Any] = json.loads(LLAMA.read_text())
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt family": ({"model_type": "lama"}, r"no model_type 'lama'\. Did you mean \w+\?"),
    "no family": ({"model_type": None}, r"model_type is None; .* llama"),
    "not a causal model": ({"model_type": "t5"}, "t5 is not a causal language model"),
    "key-value heads": (
        {"num_key_value_heads": 3},
        "num_attention_heads 4 is not a multiple of num_key_value",
    ),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0; .* whole number of at least 1"),
    "too deep": ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100000; .* at most 1,000"),
    "no words": ({"vocab_size": 0}, "vocab_size is 0"),
    "too many words": ({"vocab_size": 10**12}, "vocab_size is 1000000000000; .* at most 2,147,483,647"),
    "negative": ({"hidden_size": -64}, "hidden_size is -64"),
    "a fraction": ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    "a word for a number": ({"hidden_size": "big"}, "hidden_size is 'big'"),
    "heads": ({"num_attention_heads": 6}, "hidden size .* is not a multiple of the number of att"),
    "activation": ({"hidden_act": "sylu"}, r"no hidden_act 'sylu'\. Did you mean silu\?"),
    "rotary embedding": ({"rope_scaling": {"rope_type": "nosuch"}}, "nothing called 'nosuch'"),
}


def refused(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        build_model(Recipe(model=str(path), seq_len=8), CPU)
    return str(caught.value)


@pytest.mark.parametrize(("changes", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_config_is_one_sentence(changes, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    message = refused(path)
    assert "\n" not in message
    assert str(path) in message
    assert re.search(said, message), message


def test_every_config_of_the_project_passes():
    for name in list_models():
        path = find_model_config(name)
        assert path is not None
        check_counts(read_config(path), name)
