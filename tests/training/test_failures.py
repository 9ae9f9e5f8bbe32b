"""What the code of a model raises in a step is told as a sentence; what is ours is not."""

from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP

from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.simulate.simulated_run import simulate
from harness.training.failures import errors_explained
from tests.support.tiny import built, tiny, train

H100 = find_hardware("h100")


def _failing(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """The model's own code, given something that it cannot work with."""
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda mlp, x: forward(mlp, change(x)))


@pytest.mark.parametrize(
    ("fields", "fix"),
    [({}, "the error is in its own code"), ({"adapter": "lora"}, r"List other layers in lora_targets")],
)
def test_where_and_what_and_the_fix(fields: Any, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, lambda x: x[..., :3])
    with pytest.raises(InputError, match=rf"of llama fails at \S+:\d+: RuntimeError: .*{fix}"):
        train(tiny(**fields), 1)


def test_a_simulation_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(monkeypatch, lambda x: x)
    monkeypatch.setattr(type(ACT2FN["silu"]), "forward", lambda self, x: x * x.sum().tolist())
    with pytest.raises(InputError, match=r"llama asks for values, at transformers.*virtual GPU"):
        simulate(tiny(), H100)


def test_ddp_waits_for_what_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapters of layers that a model shares may do so, as Zamba2's."""
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: x)
    with pytest.raises(InputError, match=r"some of llama have none after a step\. Set parallel: fsdp"):
        simulate(tiny(parallel="ddp", dp_replicate=2), H100)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt(), MemoryError()])
def test_what_means_something_else_stays(error: BaseException) -> None:
    with pytest.raises(type(error)), errors_explained(built(tiny())[0].model):
        raise error


def test_a_mistake_of_ours_stays() -> None:
    with pytest.raises(RuntimeError, match="ours"), errors_explained(built(tiny())[0].model):
        raise RuntimeError("ours")


def test_a_rank_that_is_gone_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers parameters from within the model's code, where gloo then says that a rank is gone."""

    def gathers(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("gloo/transport/tcp/pair.cc:537 Read error: Connection reset by peer")

    _failing(monkeypatch, gathers)
    with pytest.raises(RuntimeError, match="Connection reset by peer"):
        train(tiny(), 1)
