"""Our evaluation and our checkpoint against the library's own: transformers.Trainer, files on disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.errors import InputError
from harness.training.evaluation import Evaluated, Evaluation, _batches, evaluate
from harness.training.saving import save_as_trainer
from tests.support.tiny import CPU, NullObserver, built, tiny

EVALUATION = Evaluation(batches=3, batch_size=2)


def evaluated(recipe, evaluation: Evaluation) -> tuple[Evaluated, list[int], torch.nn.Module]:
    """The results, how often the cache was emptied, and the model."""
    training, _ = built(recipe)
    emptied: list[int] = []
    done = evaluate(recipe, training, evaluation, CPU, NullObserver(), lambda: emptied.append(1))
    assert training.model.training
    return done, emptied, training.model


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-mixed"])
def test_logits_and_losses_are_trainers(precision: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments  # seconds, and with it data sets and accelerate

    recipe = tiny(precision=precision)
    done, _, model = evaluated(recipe, EVALUATION)
    rows = [
        {name: value[row] for name, value in batch.items()}
        for batch in _batches(recipe, built(recipe)[0], EVALUATION, CPU)
        for row in range(2)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_eval_batch_size=2,
        use_cpu=True,
        bf16=precision == "bf16-mixed",
        report_to=[],
    )
    theirs = Trainer(model, arguments, compute_metrics=lambda _: {}).predict(rows)  # type: ignore[arg-type]
    assert done.logits is not None
    assert done.logits.shape == (6, recipe.seq_len, 264)
    assert torch.equal(done.logits, torch.from_numpy(theirs.predictions))
    assert done.labels is not None
    assert torch.equal(done.labels, torch.from_numpy(theirs.label_ids))
    assert done.losses is not None
    assert done.losses.mean().item() == pytest.approx(theirs.metrics["test_loss"], rel=1e-6)


def test_the_way_changes_where_results_are_and_not_what_they_are() -> None:
    recipe = tiny()
    whole, emptied, _ = evaluated(recipe, EVALUATION)
    in_parts, emptied_in_parts, _ = evaluated(recipe, replace(EVALUATION, accumulation_steps=2))
    alone, _, _ = evaluated(recipe, replace(EVALUATION, keep_logits=False))
    assert whole.logits is not None
    assert in_parts.logits is not None
    assert torch.equal(whole.logits, in_parts.logits)
    assert (len(emptied), len(emptied_in_parts)) == (0, 1)
    assert whole.losses is not None
    assert alone.losses is not None
    assert torch.equal(whole.losses, alone.losses)
    assert alone.logits is alone.labels is None


@pytest.mark.parametrize("field", ["batches", "batch_size", "accumulation_steps"])
def test_there_is_something_to_evaluate(field: str) -> None:
    asked: dict[str, Any] = {field: 0}
    with pytest.raises(InputError, match=f"{field} of at least 1.*not 0"):
        Evaluation(**asked)


@pytest.mark.parametrize("fields", [{}, {"adapter": "lora"}], ids=["whole", "adapter alone"])
def test_a_checkpoint_is_what_trainer_leaves(fields: dict[str, str], tmp_path: Path) -> None:
    recipe = tiny(**fields)
    training, _ = built(recipe)
    save_as_trainer(recipe, training, tmp_path, NullObserver())
    adapter = "adapter" in fields
    weights = load_file(tmp_path / ("adapter_model.safetensors" if adapter else "model.safetensors"))
    trained = sum(p.numel() for p in training.model.parameters() if p.requires_grad)
    assert sum(tensor.numel() for tensor in weights.values()) == trained
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert state.keys() == training.optimizer.state_dict().keys()
