"""Random weights are in the dtypes and on the device in which transformers loads a checkpoint's."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from benchmarks.causal_models.tiny import small_config
from harness.training.toggles.precision import as_loaded
from harness.training.warnings import KERNELS, surprises_of_model
from tests.support.tiny import tiny


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_those_of_a_loaded_checkpoint(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = AutoConfig.for_model(**small_config(CONFIG_MAPPING[kind]()))
    made = as_loaded(AutoModelForCausalLM.from_config(config, dtype=dtype))
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert {name: p.dtype for name, p in made.state_dict().items()} == {
        name: p.dtype for name, p in loaded.state_dict().items()
    }
    kept = {p.dtype for p in made.state_dict().values()}
    assert (len(kept) > 1) == (kind == "ernie4_5_moe" and dtype != torch.float32)


def test_what_the_context_does_not_reach_is_moved() -> None:
    """torch.normal, which makes diffllama's lambdas, knows no default device."""
    with torch.device("meta"):
        config = AutoConfig.for_model(**small_config(CONFIG_MAPPING["diffllama"]()))
        model = AutoModelForCausalLM.from_config(config)
        assert {p.device.type for p in model.parameters()} == {"meta", "cpu"}
        as_loaded(model)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize(("kind", "packages"), [("qwen3_next", {"fla", "causal_conv1d"}), ("llama", set())])
def test_recurrent_layers_say_which_kernels_they_lack(
    kind: str, packages: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.for_model(**small_config(CONFIG_MAPPING[kind]()))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for there in (False, True):
        monkeypatch.setattr("harness.training.warnings.find_spec", lambda name, there=there: there or None)
        said = surprises_of_model(tiny(), model)
        assert len(said) == bool(packages)
        for name in packages:
            assert KERNELS[name] in said[0]
            assert ("PyTorch's own" in said[0]) != there
