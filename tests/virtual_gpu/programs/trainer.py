"""transformers' Trainer in the manner of run_clm: `trainer.py full|lora|qlora`, also under torchrun and
accelerate."""

import sys

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tiny import config, tokenizer
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

kind = sys.argv[1]
model = LlamaForCausalLM(config)
if kind == "qlora":
    model.save_pretrained("checkpoint")
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained("checkpoint", quantization_config=how, dtype=torch.bfloat16)
    model = prepare_model_for_kbit_training(model)
if kind != "full":
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
texts = [{"text": f"a text of some length {n} " * (1 + n % 4)} for n in range(64)]
data = Dataset.from_list(texts).map(
    lambda row: tokenizer(row["text"], truncation=True, max_length=64), remove_columns="text"
)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir="out",
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        bf16=True,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
    ),
    DataCollatorForLanguageModeling(tokenizer, mlm=False),
    data,
)
trainer.train()
print(f"done: peak {torch.cuda.max_memory_allocated()} bytes, reserved {torch.cuda.max_memory_reserved()}")
