"""What the trainers of this folder have in common: so many steps of so many rows of so many tokens, of which
the last one's peak is printed."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import TrainerCallback, logging

sys.path.append(str(Path(__file__).parents[1]))
from tiny import tokenizer as tokenizer

ROWS, TOKENS, STEPS = 4, 128, 3
logging.set_verbosity_error()


class Peak(TrainerCallback):
    """Counts the peak of each step alone."""

    def on_step_begin(self, *_, **__):
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *_, **__):
        self.peak = torch.cuda.max_memory_allocated()


def settings(folder, more):
    """Fields of the trainers' arguments; `more`: words of the command line."""
    return {
        "output_dir": str(Path(folder) / "out"),
        "max_steps": STEPS,
        "per_device_train_batch_size": ROWS,
        "bf16": False,
        "gradient_checkpointing": "checkpointing" in more,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
    }


def lora(**fields):
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", **fields)
