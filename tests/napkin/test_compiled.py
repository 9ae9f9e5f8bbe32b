"""What napkin says a compiled model keeps, against what torch.compile's passes and partitioner keep."""

from __future__ import annotations

import pytest
import torch

from tests.support.napkin_oracle import napkin, recipe_for, saved_bytes

# The partitioner solves for the smallest cut of the whole graph, where napkin decides tensor by tensor: they
# differ in statistics of rows and at the ends of the model, both small.
TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("llama", {"adapter": "lora"}),
        ("llama", {"precision": "bf16-mixed"}),
        ("gpt_neox", {"precision": "fp32", "attention": "eager"}),
        ("gpt2", {"precision": "fp32"}),
        ("gpt2", {"precision": "fp32", "attention": "eager"}),
    ],
    ids=str,
)
def test_a_compiled_model_keeps_what_products_read_and_the_residual_stream(tmp_path, family, fields):
    recipe = recipe_for(tmp_path, family, compile=True, **fields)
    kept = saved_bytes(recipe)
    assert napkin(recipe).sizes.kept_in_forward == pytest.approx(kept, rel=TOLERANCE)
    plain = recipe.model_copy(update={"compile": False})
    if family == "llama":
        assert kept < 0.8 * napkin(plain).sizes.kept_in_forward
