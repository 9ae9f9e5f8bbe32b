"""`mlp_tiles`: an MLP that computes a part of the sequence at a time learns what the whole one does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import InputError
from harness.training.model import build_model
from tests.support.places import MODELS
from tests.support.tiny import CPU, tiny

pytest.importorskip("liger_kernel")

LORA = {"adapter": "lora"}


def gradients(**fields: Any) -> dict[str, torch.Tensor]:
    """The loss of one micro batch, and the gradient of every weight that is trained."""
    model = build_model(tiny(precision="fp32", micro_batch_size=2, **fields), CPU)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)  # peft begins with zeros, through which nothing flows
    ids = torch.arange(32).reshape(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trained = {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
    return {"loss": loss.detach(), **trained}


@pytest.mark.parametrize("tiles", [2, 3])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        LORA,
        {"gradient_checkpointing": True},
        {**LORA, "gradient_checkpointing": True},
        {"family": "pythia"},
    ],
    ids=lambda fields: " ".join(map(str, fields.values())),
)
def test_the_gradients_are_those_of_whole_mlps(fields: dict[str, Any], tiles: int) -> None:
    whole, tiled = gradients(**fields), gradients(**fields, mlp_tiles=tiles)
    assert whole.keys() == tiled.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(tiled[name], expected, rtol=1e-5, atol=1e-6, msg=name)


def test_a_model_without_such_mlps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mlp_tiles: 2: .* has no MLP for all tokens.*; set mlp_tiles: 1"):
        build_model(tiny("mixtral", mlp_tiles=2), CPU)
    config = json.loads((MODELS / "gpt2.json").read_text()) | {"resid_pdrop": 0.1}
    (tmp_path / "gpt2.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"mlp_tiles: 2: .* drops values in its MLPs; set mlp_tiles: 1"):
        build_model(tiny(model=str(tmp_path / "gpt2.json"), mlp_tiles=2), CPU)
