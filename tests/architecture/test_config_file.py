"""A model config that cannot be built from: one sentence with the field, its value and what to write."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness.architecture.config_file import check_counts, read_config
from harness.errors import InputError
from harness.recipe.file import find_model_config, list_models
from harness.recipe.recipe import Recipe
from harness.training.model import build_model
from tests.support.places import LLAMA
from tests.support.tiny import CPU

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


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"llama"', " " * 1_000_001])
def test_what_is_no_config_is_refused(content, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(content)
    assert refused(path).startswith(f"model: {path}")


def test_every_config_of_the_project_passes():
    for name in list_models():
        path = find_model_config(name)
        assert path is not None
        check_counts(read_config(path), name)
