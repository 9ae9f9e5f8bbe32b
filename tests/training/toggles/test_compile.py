"""compile: the model goes through torch.compile, and computes the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.support.long import long
from tests.support.tiny import NullObserver, tiny, train

COMPILE = torch.compile


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models given to torch.compile. Graphs run as captured: building C++ for them takes minutes."""
    given: list[nn.Module] = []

    def compile_eagerly(function: Any = None, **options: Any) -> Any:
        model = getattr(function, "__self__", None)
        if not isinstance(model, nn.Module):  # bitsandbytes' own functions
            return COMPILE(function, **options)
        given.append(model)
        return COMPILE(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch._dynamo.reset()
    counters.clear()
    return given


@pytest.mark.parametrize(
    "fields",
    [
        {},
        pytest.param({"adapter": "lora", "lora_targets": ["q_proj"], "precision": "bf16-mixed"}, marks=long),
    ],
)
def test_the_whole_model_is_compiled_and_computes_the_same(
    fields: dict[str, Any], compiled: list[nn.Module]
) -> None:
    plain = train(tiny(**fields), 3)
    assert compiled == []
    graphs: list[int] = []

    def look() -> None:
        graphs.append(counters["stats"]["unique_graphs"])

    run = train(tiny(**fields, compile=True), 3, NullObserver(backward=look))
    assert compiled == [run.training.model]
    assert graphs[0] >= 1
    assert graphs[1:] == graphs[:1] * 2  # steps of one shape: nothing is compiled again
    assert counters["stats"]["calls_captured"] > 50
    budget = train(tiny(**fields, compile=True, activation_memory_budget=0.5), 3)
    assert torch._functorch.config.activation_memory_budget == 0.5
    assert budget.losses == pytest.approx(run.losses, rel=1e-6)
    tolerance = 1e-3 if "precision" in fields else 1e-5  # compiled, an operator may keep fp32 for longer
    assert run.losses == pytest.approx(plain.losses, rel=tolerance)
