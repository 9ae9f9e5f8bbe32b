"""TRL's ORPOTrainer on pairs without padding, or GRPOTrainer's step on answers that are there: `answers.py
CONFIG orpo|grpo full|lora [checkpointing]`. Its last line has the allocated peak of the last of three steps,
in bytes."""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback, logging
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

sys.path.append(str(Path(__file__).parents[1]))
from tiny import tokenizer

ROWS, TOKENS, STEPS = 4, 128, 3
path, task, kind, *more = sys.argv[1:]
logging.set_verbosity_error()


def ids(tokens):
    return torch.randint(0, 200, (ROWS, tokens))


def pairs(examples):
    batch = {}
    for side in ("chosen", "rejected"):
        batch[f"{side}_input_ids"] = ids(TOKENS)
        batch[f"{side}_attention_mask"] = torch.ones(ROWS, TOKENS, dtype=torch.int64)
        batch[f"{side}_labels"] = batch[f"{side}_input_ids"].clone()
        batch[f"{side}_labels"][:, 0] = -100
    return batch


class OfGivenAnswers(GRPOTrainer):
    """Generates nothing: the prompt is a token."""

    def _prepare_inputs(self, examples):
        batch = {"prompt_ids": ids(1), "completion_ids": ids(TOKENS - 1)}
        batch |= {f"{name}_mask": torch.ones_like(batch[f"{name}_ids"]) for name in ("prompt", "completion")}
        batch["advantages"] = torch.ones(ROWS)
        batch["num_items_in_batch"] = torch.tensor(ROWS * (TOKENS - 1))
        return {name: tensor.to("cuda") for name, tensor in batch.items()}


class Peak(TrainerCallback):
    """Counts the peak of each step alone."""

    def on_step_begin(self, *_, **__):
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *_, **__):
        self.peak = torch.cuda.max_memory_allocated()


torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
orpo = task == "orpo"
rows = [{"prompt": "a", "chosen": f"b{n}", "rejected": "c"} for n in range(ROWS * STEPS)]
settings = {"remove_unused_columns": False} if orpo else {"num_generations": ROWS}
given = {"data_collator": pairs} if orpo else {"reward_funcs": lambda completions, **_: [0.0] * ROWS}
peak = Peak()
with tempfile.TemporaryDirectory() as folder:
    trainer = (ORPOTrainer if orpo else OfGivenAnswers)(
        model,
        args=(ORPOConfig if orpo else GRPOConfig)(
            output_dir=str(Path(folder) / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            bf16=False,
            gradient_checkpointing="checkpointing" in more,
            optim="adamw_torch",
            max_grad_norm=1.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            dataloader_pin_memory=False,
            **settings,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if kind == "lora" else None,
        callbacks=[peak],
        **given,
    )
    trainer.train()
print(f"done: peak {peak.peak} bytes")
