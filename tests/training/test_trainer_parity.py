"""An outside witness: transformers.Trainer, given the same weights and rows, has the same losses."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from harness.recipe.recipe import Recipe
from tests.support.long import long
from tests.support.tiny import MODELS, built, tiny, train, weights

STEPS = 20
LINES = ["How", "vexingly quick", "daft zebras jump!", "Pack my box with five dozen jugs", "Sphinx of quartz"]


class Witness(Trainer):
    """Trainer that takes the rows in their order and keeps each micro batch's loss (its log rounds them)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_losses: list[float] = []

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset if train_dataset is not None else self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        self.micro_losses.append(loss.item())
        return loss


def their_model(recipe: Recipe, dtype: torch.dtype) -> Any:
    """The model by transformers and peft alone."""
    config = AutoConfig.for_model(**json.loads((MODELS / "llama.json").read_text()))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    if recipe.adapter == "none":
        return model
    rank, alpha = recipe.lora_rank, int(recipe.lora_alpha)
    lora = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def losses_of_trainer(
    recipe: Recipe, start: dict[str, Tensor], folder: Path, **arguments: Any
) -> list[float]:
    """The loss of each optimizer step of transformers.Trainer from the weights in `start`."""
    model = their_model(recipe, next(iter(start.values())).dtype)
    names = dict(model.named_parameters()).keys()
    assert names == start.keys()
    model.load_state_dict(start, strict=False)
    _, batches = built(recipe)
    rows = [
        {name: value[row] for name, value in batch.items()}
        for batch in (batch for _ in range(STEPS) for batch in next(batches)[0])
        for row in range(recipe.micro_batch_size)
    ]
    unequal = {sum(int(label != -100) for label in row["labels"]) for row in rows}
    assert len(unequal) > 3  # or the accumulation by tokens would not be seen
    trainer = Witness(
        model,
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=recipe.micro_batch_size,
            gradient_accumulation_steps=recipe.gradient_accumulation_steps,
            max_steps=STEPS,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.max_grad_norm or 0.0,
            optim="adamw_torch",
            seed=recipe.seed,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=rows,  # type: ignore[arg-type]
    )
    trainer.train()
    assert len(trainer.micro_losses) == STEPS * recipe.gradient_accumulation_steps
    steps = torch.tensor(trainer.micro_losses, dtype=torch.float64).reshape(STEPS, -1)
    return steps.sum(1).tolist()


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        pytest.param({}, {}, marks=long),
        pytest.param({"gradient_accumulation_steps": 4}, {}, marks=long),
        pytest.param({"gradient_accumulation_steps": 4, "max_grad_norm": 1.0}, {}, marks=long),
        (
            {"precision": "bf16-mixed", "gradient_checkpointing": True},
            {"bf16": True, "gradient_checkpointing": True},
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_twenty_steps_have_the_losses_of_trainer(
    adapter: str, fields: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    recipe = tiny(data=str(data), adapter=adapter, learning_rate=3e-3, seq_len=32, **fields)
    start = weights(built(recipe)[0])
    ours = train(recipe, STEPS).losses
    theirs = losses_of_trainer(recipe, start, tmp_path, **arguments)
    assert ours[-1] < ours[0] - 0.2
    assert ours == pytest.approx(theirs, rel=1e-5)
