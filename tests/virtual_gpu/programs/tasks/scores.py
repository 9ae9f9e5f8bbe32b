"""TRL's RewardTrainer and transformers' Trainer of a classifier, without padding: `scores.py CONFIG
reward|classification [lora] [checkpointing]`. Its last line has the allocated peak of the last of three
steps, in bytes."""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    logging,
)
from trl import RewardConfig, RewardTrainer

sys.path.append(str(Path(__file__).parents[1]))
from tiny import tokenizer

ROWS, TOKENS, STEPS = 4, 128, 3
path, kind, *more = sys.argv[1:]
logging.set_verbosity_error()


def collate(examples):
    """Rows of TOKENS tokens: of pairs two for each example, otherwise with a class."""
    rows = len(examples) * (2 if kind == "reward" else 1)
    batch = {"input_ids": torch.randint(0, 200, (rows, TOKENS))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch if kind == "reward" else batch | {"labels": torch.randint(0, 5, (rows,))}


class Peak(TrainerCallback):
    """Counts the peak of each step alone."""

    def on_step_begin(self, *_, **__):
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *_, **__):
        self.peak = torch.cuda.max_memory_allocated()


config = AutoConfig.from_pretrained(path, num_labels=1 if kind == "reward" else 5, pad_token_id=0)
model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
if "lora" in more:
    how = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS")
    model = get_peft_model(model, how)
settings = {
    "max_steps": STEPS,
    "per_device_train_batch_size": ROWS,
    "bf16": False,
    "gradient_checkpointing": "checkpointing" in more,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "optim": "adamw_torch",
    "max_grad_norm": 1.0,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
}
rows = Dataset.from_list([{"chosen": f"a{n}", "rejected": "b"} for n in range(ROWS * STEPS)])
peak = Peak()
with tempfile.TemporaryDirectory() as folder:
    common = {"train_dataset": rows, "data_collator": collate, "callbacks": [peak]}
    if kind == "reward":
        arguments = RewardConfig(str(Path(folder) / "out"), **settings)
        trainer = RewardTrainer(model, args=arguments, processing_class=tokenizer, **common)
    else:
        trainer = Trainer(model, TrainingArguments(str(Path(folder) / "out"), **settings), **common)
    trainer.train()
print(f"done: peak {peak.peak} bytes")
