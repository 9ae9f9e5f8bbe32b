"""TRL's RewardTrainer and transformers' Trainer of a classifier, without padding: `scores.py CONFIG
reward|classification [lora] [checkpointing]`. Its last line has the allocated peak of the last of three
steps, in bytes."""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import get_peft_model
from steps import ROWS, STEPS, TOKENS, Peak, lora, settings, tokenizer
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments
from trl import RewardConfig, RewardTrainer

path, kind, *more = sys.argv[1:]


def collate(examples):
    """Rows of TOKENS tokens: of pairs two for each example, otherwise with a class."""
    rows = len(examples) * (2 if kind == "reward" else 1)
    batch = {"input_ids": torch.randint(0, 200, (rows, TOKENS))}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch if kind == "reward" else batch | {"labels": torch.randint(0, 5, (rows,))}


config = AutoConfig.from_pretrained(path, num_labels=1 if kind == "reward" else 5, pad_token_id=0)
model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
if "lora" in more:
    model = get_peft_model(model, lora(task_type="SEQ_CLS"))
rows = Dataset.from_list([{"chosen": f"a{n}", "rejected": "b"} for n in range(ROWS * STEPS)])
peak = Peak()
with tempfile.TemporaryDirectory() as folder:
    told = settings(folder, more) | {"remove_unused_columns": False}
    told["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    common = {"train_dataset": rows, "data_collator": collate, "callbacks": [peak]}
    if kind == "reward":
        trainer = RewardTrainer(model, args=RewardConfig(**told), processing_class=tokenizer, **common)
    else:
        trainer = Trainer(model, TrainingArguments(**told), **common)
    trainer.train()
print(f"done: peak {peak.peak} bytes")
