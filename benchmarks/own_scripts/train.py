"""Full fine-tuning of Llama-3.2-1B with transformers' Trainer, without a word about harness."""

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

NAME = "meta-llama/Llama-3.2-1B"

tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token
rows = [dict(tokenizer("word " * 1000, truncation=True, max_length=2048)) for _ in range(64)]
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16),
    TrainingArguments("out", per_device_train_batch_size=8, max_steps=5, save_strategy="no"),
    train_dataset=Dataset.from_list(rows),
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
