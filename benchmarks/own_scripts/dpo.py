"""DPO of Llama-3.1-8B with TRL and LoRA, BS pairs of answers a step, each row of 2,048 tokens."""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

NAME, BS = "meta-llama/Llama-3.1-8B", int(os.environ["BS"])

tokenizer = AutoTokenizer.from_pretrained(NAME)
tokenizer.pad_token = tokenizer.eos_token
pair = {"prompt": "word " * 200, "chosen": "yes " * 400, "rejected": "no " * 400}
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16),
    args=DPOConfig("out", per_device_train_batch_size=BS, max_steps=3, max_length=2048, save_strategy="no"),
    train_dataset=Dataset.from_list([pair] * 3 * BS),
    processing_class=tokenizer,
    peft_config=LoraConfig(target_modules="all-linear"),
)
trainer.train()
