"""packing: a step over packed rows is the step over the same documents, each in a row of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.testing import assert_close

from harness.training.step import Training
from tests.support.tiny import NullObserver, built, step, tiny

TEXTS = [
    *("a", "bright cold day", "in April", "and the clocks were", "striking", "thirteen", "as", "we all know"),
]
SEQ_LEN = 24


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def one_epoch(data: Path, packing: bool, **fields: Any) -> tuple[float, dict[str, Tensor], int]:
    """The loss and the gradients of one step that sees every document once, and how many rows that takes."""
    recipe = tiny(data=str(data), packing=packing, seq_len=SEQ_LEN, micro_batch_size=1, **fields)
    rows = built(recipe)[1].rows.num_rows  # type: ignore[attr-defined]
    recipe = recipe.model_copy(update={"gradient_accumulation_steps": rows})
    training, batches = built(recipe)
    gradients: dict[str, Tensor] = {}
    loss = step(training, batches, NullObserver(optimizer_step=lambda: gradients.update(copied(training))))
    return loss.item(), gradients, rows


def copied(training: Training) -> dict[str, Tensor]:
    named = training.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention": "eager"},
        {"gradient_checkpointing": True},
        {"adapter": "lora"},
        {"family": "gpt2"},
        {"family": "pythia"},
        {"family": "gemma2", "attention": "eager"},
    ],
)
def test_packed_documents_give_the_gradients_they_give_alone(documents: Path, fields: dict[str, Any]) -> None:
    """Those alone are padded on the right, without a mask."""
    alone_loss, alone, alone_rows = one_epoch(documents, packing=False, **fields)
    loss, packed, rows = one_epoch(documents, packing=True, **fields)
    # by hand: 68 characters and 8 end-of-document tokens are four rows of 24 at the least
    assert (alone_rows, rows) == (len(TEXTS), 4)
    assert loss == pytest.approx(alone_loss, rel=1e-6)
    assert packed.keys() == alone.keys() != set()
    for name in alone:
        assert_close(packed[name], alone[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("family", "dropped"),
    [
        ("llama", {"attention_mask", "position_ids"}),  # documents see each other
        ("gpt2", {"position_ids"}),  # its positions are learned: going on counting is another input
    ],
)
def test_without_separation_the_loss_is_another(documents: Path, family: str, dropped: set[str]) -> None:
    """The test above can fail."""
    expected = one_epoch(documents, packing=True, family=family)[0]
    fields = {"seq_len": SEQ_LEN, "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    training, batches = built(tiny(family, data=str(documents), packing=True, **fields))
    micro_batches, num_tokens = next(batches)
    loss = 0.0
    for batch in micro_batches:
        kept = {name: value for name, value in batch.items() if name not in dropped}
        assert len(kept) == len(batch) - len(dropped)
        loss += training.model(**kept, num_items_in_batch=num_tokens).loss.item()
    assert loss != pytest.approx(expected, rel=1e-5)
