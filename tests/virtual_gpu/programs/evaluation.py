"""transformers' own evaluation and checkpoint after two steps of ours: `evaluation.py RECIPE SETTINGS`.

RECIPE is a recipe as JSON; SETTINGS is a JSON object of batches, batch_size, accumulation_steps, keep_logits.
Prints the largest allocated bytes within each as JSON; under torchrun rank 0 does.
"""

import gc
import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

from harness.recipe import Recipe
from harness.training.loop import run_steps, set_up
from tests.support.tiny import NullObserver

recipe, asked = Recipe(**json.loads(sys.argv[1])), json.loads(sys.argv[2])
ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("cpu:gloo,cuda:nccl")
training, batches = set_up(recipe, device, NullObserver())
for _ in run_steps(training, batches, device, ["warmup", "recorded"], NullObserver()):
    pass
rows = torch.zeros(ranks * asked["batches"] * asked["batch_size"], recipe.seq_len, dtype=torch.int64)
data = [{"input_ids": row, "labels": row} for row in rows]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        training.model,
        TrainingArguments(
            output_dir=folder,
            per_device_eval_batch_size=asked["batch_size"],
            eval_accumulation_steps=asked["accumulation_steps"],
            prediction_loss_only=not asked["keep_logits"],
            bf16=recipe.precision == "bf16-mixed",
            report_to=[],
        ),
        eval_dataset=data,
        compute_metrics=lambda predictions: {},
        optimizers=(training.optimizer, torch.optim.lr_scheduler.ConstantLR(training.optimizer)),
    )
    peaks = {}
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.evaluate()
    peaks["evaluation"] = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    trainer.save_model(folder)
    trainer._save_optimizer_and_scheduler(folder)
    peaks["saving"] = torch.cuda.max_memory_allocated()
if rank == 0:
    print(json.dumps({"before": before, **peaks}))
if ranks > 1:
    dist.destroy_process_group()
