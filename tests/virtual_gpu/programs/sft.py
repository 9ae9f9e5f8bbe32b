"""TRL's SFTTrainer as a user writes it, with a tiny model: `sft.py KIND`, plain, packing, completion,
lora."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import config, tokenizer
from transformers import LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

kind = sys.argv[1]
model = LlamaForCausalLM(config)
rows = [{"prompt": f"a question {n} ", "completion": "an answer " * (1 + n % 7)} for n in range(64)]
trainer = SFTTrainer(
    model,
    args=SFTConfig(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=4,
        max_length=64,
        bf16=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        packing=kind == "packing",
        completion_only_loss=kind == "completion",
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    peft_config=LoraConfig(target_modules="all-linear") if kind == "lora" else None,
)
trainer.train()
tokens = trainer.state.log_history[0].get("num_tokens")
print(f"done: peak {torch.cuda.max_memory_allocated()} bytes, {tokens} tokens")
