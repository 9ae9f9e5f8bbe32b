"""TRL's DPOTrainer on pairs without padding, or KTOTrainer or SFTTrainer on as many rows: `dpo.py CONFIG
full|lora|precomputed [checkpointing] [kto|sft]`. Its last line has the allocated peak of the last of three
steps, in bytes."""

import sys
import tempfile

import torch
from datasets import Dataset
from steps import ROWS, STEPS, TOKENS, Peak, lora, settings, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

path, kind, *more = sys.argv[1:]
kto, sft = "kto" in more, "sft" in more


class Collator:
    """Rows of TOKENS tokens, of which the first is the prompt."""

    def __call__(self, examples):
        rows = len(examples) * (1 if kto or sft else 2)
        learned = torch.ones(rows, TOKENS, dtype=torch.int64)
        batch = {"input_ids": torch.randint(0, 200, (rows, TOKENS)), "attention_mask": learned.clone()}
        learned[:, 0] = 0
        if sft:
            return batch | {"labels": batch["input_ids"].where(learned == 1, -100)}
        batch["completion_mask"] = learned
        if kto:
            batch |= {f"KL_{name}": tensor.clone() for name, tensor in batch.items()}
            batch["label"] = torch.arange(rows) < rows // 2
        for name in ("ref_chosen_logps", "ref_rejected_logps", "ref_logps", "ref_KL_logps"):
            if name in examples[0]:
                batch[name] = torch.tensor([example[name] for example in examples])
        return batch


def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)


rows = [{"prompt": "a", "chosen": f"b{n}", "rejected": "c"} for n in range(ROWS * STEPS)]
if kto:
    rows = [{"prompt": "a", "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(rows)]
if sft:
    rows = [{"text": "a"}] * len(rows)
Config, Trainer = (
    (KTOConfig, KTOTrainer) if kto else (SFTConfig, SFTTrainer) if sft else (DPOConfig, DPOTrainer)
)
preference = {} if sft else {"precompute_ref_log_probs": kind == "precomputed"}
peak = Peak()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model(),
        *([] if sft else [model() if kind == "full" else None]),
        args=Config(**settings(folder, more), **preference),
        data_collator=Collator(),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora() if kind == "lora" else None,
        callbacks=[peak],
    )
    trainer.train()
print(f"done: peak {peak.peak} bytes")
