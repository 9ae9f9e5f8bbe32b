"""TRL's ORPOTrainer on pairs without padding, or GRPOTrainer's step on answers that are there: `answers.py
CONFIG orpo|grpo full|lora [checkpointing] [reference]`. Its last line has the allocated peak of the last of
three steps, in bytes."""

import sys
import tempfile

import torch
from datasets import Dataset
from steps import ROWS, STEPS, TOKENS, Peak, lora, settings, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

path, task, kind, *more = sys.argv[1:]


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
        if self.beta:
            batch["ref_per_token_logps"] = torch.full((ROWS, TOKENS - 1), -5.0)
        batch["num_items_in_batch"] = torch.tensor(ROWS * (TOKENS - 1))
        return {name: tensor.to("cuda") for name, tensor in batch.items()}


torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
orpo = task == "orpo"
rows = [{"prompt": "a", "chosen": f"b{n}", "rejected": "c"} for n in range(ROWS * STEPS)]
own = {"remove_unused_columns": False} if orpo else {"num_generations": ROWS}
if "reference" in more:
    own["beta"] = 0.04
given = {"data_collator": pairs} if orpo else {"reward_funcs": lambda completions, **_: [0.0] * ROWS}
peak = Peak()
with tempfile.TemporaryDirectory() as folder:
    if "reference" in more:  # which the trainer loads from where the model is
        model.save_pretrained(folder)
        model.config._name_or_path = folder
    trainer = (ORPOTrainer if orpo else OfGivenAnswers)(
        model,
        args=(ORPOConfig if orpo else GRPOConfig)(**settings(folder, more), **own),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora() if kind == "lora" else None,
        callbacks=[peak],
        **given,
    )
    trainer.train()
print(f"done: peak {peak.peak} bytes")
