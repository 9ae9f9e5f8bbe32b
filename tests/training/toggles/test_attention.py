"""attention: the kernels agree, what cannot run here is refused, and nothing is fetched."""

import socket
from typing import Any

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from harness.errors import InputError
from harness.recipe import Recipe
from harness.training.model import build_model
from harness.training.model_config import load_config
from harness.training.toggles.attention import attention_kernel, attention_problems
from tests.support.tiny import CPU, tiny, train


@pytest.mark.parametrize("fields", [{}, {"packing": True}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "pythia", "mixtral"])
def test_eager_and_sdpa_agree(family: str, fields: dict[str, Any]) -> None:
    eager = train(tiny(family, attention="eager", **fields), 5)
    sdpa = train(tiny(family, attention="sdpa", **fields), 5)
    assert sdpa.losses == pytest.approx(eager.losses, rel=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_what_runs_is_what_was_asked_for(
    attention: str, adapter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """eager calls softmax, sdpa calls scaled_dot_product_attention and leaves the softmax to it."""
    calls = {"sdpa": 0, "eager": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    functional = torch.nn.functional
    sdpa = counted("sdpa", functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(functional, "softmax", counted("eager", functional.softmax))
    training, _ = train(tiny(attention=attention, adapter=adapter), 1)
    other = {"eager": "sdpa", "sdpa": "eager"}[attention]
    assert (calls[attention], calls[other]) == (2, 0)  # once in each block
    assert attention_kernel(training.model) == attention


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_flash_attention_on_a_cpu_is_refused(attention: str) -> None:
    with pytest.raises(InputError, match=f"attention: {attention} needs an NVIDIA GPU; set attention: sdpa"):
        build_model(tiny(attention=attention, precision="bf16"), CPU)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
@pytest.mark.parametrize("weights", ["random", "pretrained"])
def test_flash_attention_is_never_fetched(
    attention: str, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the package, transformers would run kernels of the Hub: refused before anything is built."""
    check = f"is_flash_attn_{attention[-1]}_available"
    monkeypatch.setattr(f"transformers.utils.{check}", lambda: False)

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tried to connect")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    recipe = tiny(attention=attention, precision="bf16", weights=weights)
    with pytest.raises(InputError, match=FLASH_HINTS[attention]) as refused:
        build_model(recipe, torch.device("cuda"))
    # the extra is flash-attn 2, which has no kernel of flash-attn 3
    assert ("pip install" in str(refused.value)) == (attention == "flash_attention_2")


FLASH_HINTS = {
    "flash_attention_2": r"pip install 'finetune-harness\[flash-attn\]'",
    "flash_attention_3": r"flash-attn-3, which is not installed.* Build it from the folder hopper",
    "flash_attention_4": r"flash-attn-4, which is not installed.* Build it from the folder flash_attn/cute",
}


@pytest.mark.parametrize("supports_sdpa", [False, True])  # as transformers 5.23 says, and as 5.17 does
def test_capped_scores_refuse_sdpa(supports_sdpa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", supports_sdpa)
    with pytest.raises(InputError, match=r"attention: sdpa: gemma2 caps .* set attention: eager"):
        build_model(tiny("gemma2"), CPU)
    assert len(train(tiny("gemma2", attention="eager"), 1).losses) == 1


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flash_attention_4"])
def test_attention_with_sinks_takes_the_packages_that_know_them(attention: str) -> None:
    recipe = Recipe(model="gpt-oss-20b", attention=attention, precision="bf16")
    problems = list(attention_problems(recipe, load_config(recipe), torch.device("meta")))
    assert [problem.line for problem in problems] == ["attention: eager"] * (attention != "flash_attention_4")


def test_flex_attention_needs_a_gpu_and_weights_that_none_drops() -> None:
    with pytest.raises(InputError, match=r"flex_attention needs an NVIDIA GPU; set attention: sdpa"):
        build_model(tiny(attention="flex_attention", seq_len=128), CPU)
    dropping = Recipe(model="gpt2-small", attention="flex_attention", seq_len=1024)
    problems = list(attention_problems(dropping, load_config(dropping), torch.device("meta")))
    assert "drops some of its attention weights" in problems[-1].sentence


def test_a_model_without_sdpa_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaPreTrainedModel, "_supports_sdpa", False)
    with pytest.raises(InputError, match=r"attention: sdpa: .* cannot run with it; set attention: eager"):
        build_model(tiny(), CPU)
