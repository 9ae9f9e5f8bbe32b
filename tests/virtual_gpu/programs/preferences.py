"""TRL's DPOTrainer (a reference model, or LoRA without one) and RewardTrainer: `preferences.py
dpo|dpo-lora|reward`."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import config, tokenizer
from transformers import LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

kind = sys.argv[1]
rows = [
    {"prompt": f"a question {n} ", "chosen": "yes " * (1 + n % 5), "rejected": "no " * (1 + n % 3)}
    for n in range(32)
]
common = {
    "output_dir": "out",
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "max_length": 64,
    "bf16": True,
    "report_to": [],
    "save_strategy": "no",
}
if kind == "reward":
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    data = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in rows]
    trainer = RewardTrainer(
        model, args=RewardConfig(**common), train_dataset=Dataset.from_list(data), processing_class=tokenizer
    )
else:
    trainer = DPOTrainer(
        LlamaForCausalLM(config),
        LlamaForCausalLM(config) if kind == "dpo" else None,
        args=DPOConfig(**common),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(target_modules="all-linear") if kind == "dpo-lora" else None,
    )
trainer.train()
print(f"done: peak {torch.cuda.max_memory_allocated()} bytes")
