"""The same training by others: transformers.Trainer and TRL's SFTTrainer beside the harness's own loop.

All train the model that harness builds (weights, adapter, quantization, attention, checkpointing, loss)
on the same rows in the same order. The loop around it, the optimizer and autocast are each one's own.
A step's time is the clock's, from one step's end to the next, the device done: data included, everywhere.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler

from harness.errors import InputError
from harness.measure.observer import Unobserved
from harness.recipe.recipe import Recipe
from harness.training.loop import Kind, run_steps, set_up
from harness.training.model import build_model
from harness.training.model_config import load_config

OPTIMIZERS = {
    ("adamw", "foreach"): "adamw_torch",
    ("adamw", "fused"): "adamw_torch_fused",
    ("adamw_8bit", "foreach"): "adamw_bnb_8bit",
    ("paged_adamw_8bit", "foreach"): "paged_adamw_8bit",
}
"""What Trainer calls the optimizers that both have."""


class _Clock:
    """Times of steps and the peak of memory, after the warmup steps."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.warmup_steps, self.device = recipe.warmup_steps, device
        self.step_s: list[float] = []
        self._steps = 0
        self._last_s = 0.0

    def step_ended(self) -> None:
        """A step's work is queued: wait for it, and note the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now_s = time.perf_counter()
        if self._steps >= self.warmup_steps:
            self.step_s.append(now_s - self._last_s)
        self._steps += 1
        if self._steps == self.warmup_steps and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._last_s = time.perf_counter()

    def result(self, mean_loss: float) -> dict[str, Any]:
        """Plain data; bytes are None on a CPU."""
        on_gpu = self.device.type == "cuda"
        return {
            "step_s": self.step_s,
            "median_step_s": statistics.median(self.step_s),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
            "mean_loss": mean_loss,
        }


def by_harness(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """warmup_steps and then steps of `recipe`, by the harness's loop with nobody observing."""
    clock = _Clock(recipe, device)
    training, batches = set_up(recipe, device, Unobserved())
    losses = []
    kinds: list[Kind] = ["timed"] * (recipe.warmup_steps + recipe.steps)
    for step in run_steps(training, batches, device, kinds, Unobserved()):
        clock.step_ended()
        losses.append(step.loss)
    return clock.result(float(torch.stack(losses).mean()))


def by_trainer(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """The same by transformers.Trainer."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    with tempfile.TemporaryDirectory() as folder:
        return _trained(
            recipe,
            device,
            lambda model, rows, callback: _in_order(Trainer)(
                model=model,
                args=TrainingArguments(**_arguments(recipe, device, folder)),
                train_dataset=rows,
                data_collator=default_data_collator,
                callbacks=[callback],
            ),
        )


def by_sft_trainer(recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """The same by TRL's SFTTrainer, whose own loss never holds all the logits."""
    import datasets
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")
    with tempfile.TemporaryDirectory() as folder:
        arguments = _arguments(recipe, device, folder) | {
            "max_length": None,
            "gradient_checkpointing": False,  # the model has it already, if it is to have it
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
        return _trained(
            recipe,
            device,
            lambda model, rows, callback: _in_order(trl.SFTTrainer)(
                model=model,
                args=trl.SFTConfig(**arguments),
                train_dataset=datasets.Dataset.from_list(rows.rows),
                processing_class=tokenizer,
                callbacks=[callback],
            ),
        )


class _Rows(Dataset[dict[str, Any]]):
    """The rows of the recipe's first steps, in the harness's order."""

    def __init__(self, recipe: Recipe) -> None:
        from harness.training.batches import build_batches

        text = load_config(recipe).get_text_config()
        batches = build_batches(recipe, vocab_size=text.vocab_size, tokenizer_source=None, dense_mask=True)
        number = (recipe.warmup_steps + recipe.steps) * recipe.tokens_per_step // recipe.seq_len
        drawn = (batches.rows.draw(index) for index in range(number))
        self.rows = [{"input_ids": row.input_ids, "labels": row.labels} for row in drawn]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def _trained(recipe: Recipe, device: torch.device, build: Callable[..., Any]) -> dict[str, Any]:
    from transformers import TrainerCallback

    clock = _Clock(recipe, device)

    class Clocked(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            clock.step_ended()

    trainer = build(build_model(recipe, device), _Rows(recipe), Clocked())
    return clock.result(trainer.train().training_loss)


def _in_order(trainer: type) -> Any:
    """`trainer`, but the rows come in their order."""

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def _arguments(recipe: Recipe, device: torch.device, folder: str) -> dict[str, Any]:
    """TrainingArguments for `recipe`: its toggles, no logging, no saving. Raises InputError if Trainer
    has nothing like one of them.
    """
    optimizer = OPTIMIZERS.get((recipe.optimizer, recipe.optimizer_impl))
    lacking = {
        "optimizer": optimizer is None,
        "precision": recipe.precision == "fp16",
        "master_weights": recipe.master_weights,
        "optimizer_in_backward": recipe.optimizer_in_backward,
        "offload": bool(recipe.offload),
        "packing": recipe.packing,
    }
    for name, is_lacking in lacking.items():
        if is_lacking:
            raise InputError(f"{name}: {getattr(recipe, name)}: Trainer has nothing like it.")
    return {
        "output_dir": folder,
        "use_cpu": device.type == "cpu",
        "per_device_train_batch_size": recipe.micro_batch_size,
        "gradient_accumulation_steps": recipe.gradient_accumulation_steps,
        "max_steps": recipe.warmup_steps + recipe.steps,
        "bf16": recipe.precision == "bf16-mixed",
        "fp16": recipe.precision == "fp16-mixed",
        "optim": optimizer,
        "learning_rate": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "lr_scheduler_type": "constant",
        "max_grad_norm": recipe.max_grad_norm or 0.0,  # 0: no clipping
        "torch_compile": recipe.compile,
        "seed": recipe.seed,
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
