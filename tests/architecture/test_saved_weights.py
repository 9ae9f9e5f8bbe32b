"""A checkpoint whose weights are saved quantized is counted as the recipe says, and that is said."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BitsAndBytesConfig, GPTQConfig, Mxfp4Config

import harness
from tests.support.places import MODELS

SAVED = {
    "bitsandbytes": BitsAndBytesConfig(load_in_4bit=True),
    "gptq": GPTQConfig(bits=4),
    "mxfp4": Mxfp4Config(),
}


def model(folder: Path, saved: Any) -> Path:
    config = json.loads((MODELS / "llama.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": saved.to_dict()}))
    return folder


@pytest.mark.parametrize("method", SAVED)
@pytest.mark.parametrize("ask", [harness.napkin, harness.simulate])
def test_weights_that_are_saved_quantized_are_counted_as_the_recipe_says(
    method: str, ask: Any, tmp_path: Path
) -> None:
    path = model(tmp_path, SAVED[method])
    whole = ask(path, adapter="lora", seq_len=64)
    plain = ask(MODELS / "llama.json", adapter="lora", seq_len=64)
    assert whole.memory == plain.memory
    (warning,) = whole.warnings
    assert f"saved quantized ({method}). They are counted as they were before" in warning
    assert not plain.warnings
    assert not ask(path, adapter="lora", seq_len=64, quantization="nf4").warnings
