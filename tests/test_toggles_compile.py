"""compile: the model goes through torch.compile, and computes the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tiny import NullObserver, tiny, train
from torch._dynamo.utils import counters

COMPILE = torch.compile


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was given to torch.compile. Graphs are run as captured: building C++ for them takes minutes."""
    given: list[Any] = []

    def compile_eagerly(function: Any, **options: Any) -> Any:
        given.append((function, options))
        return partial(COMPILE, backend="aot_eager")(function)

    monkeypatch.setattr(torch, "compile", compile_eagerly)
    torch._dynamo.reset()
    counters.clear()
    return given


@pytest.mark.parametrize(
    "fields", [{}, {"adapter": "lora", "gradient_checkpointing": True, "precision": "bf16-mixed"}]
)
def test_the_whole_model_is_compiled_and_computes_the_same(
    fields: dict[str, Any], compiled: list[Any]
) -> None:
    plain = train(tiny(**fields), 3)
    assert compiled == []
    graphs: list[int] = []

    def look() -> None:
        graphs.append(counters["stats"]["unique_graphs"])

    run = train(tiny(**fields, compile=True), 3, NullObserver(backward=look))
    assert [function.__self__ for function, _ in compiled] == [run.training.model]
    assert graphs[0] >= 1
    assert graphs[1:] == graphs[:1] * 2  # steps of one shape: nothing is compiled again
    assert counters["stats"]["calls_captured"] > 50
    tolerance = 1e-3 if "precision" in fields else 1e-5  # compiled, an operator may keep fp32 for longer
    assert run.losses == pytest.approx(plain.losses, rel=tolerance)
