"""Memory runs out in backward of step 2, of several ranks on the last: `runs_out.py plain|trainer`."""

import os
import sys

import torch
from torch import nn

KIND, RANK, RANKS = sys.argv[1], int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
WIDTH, ROWS, MANY_ROWS = 1024, 16, 7 << 18
"""MANY_ROWS are 7 GiB in every layer: forward holds three times as much, and backward wants a fourth."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == 2 and RANK == RANKS - 1:
            rows = rows.repeat(MANY_ROWS // len(rows), 1)
        return {"loss": self.second(self.first(rows)).mean()}


def train_plain() -> None:
    model = Net().to("cuda")
    run = model
    if RANKS > 1:
        torch.cuda.set_device(RANK)
        model.to(f"cuda:{RANK}")
        torch.distributed.init_process_group("nccl")
        run = nn.parallel.DistributedDataParallel(model, device_ids=[RANK])
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        run(torch.ones(ROWS, WIDTH, device=f"cuda:{RANK}"))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_trainer() -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="out", max_steps=4, per_device_train_batch_size=ROWS, save_strategy="no", report_to=[]
    )
    Trainer(Net(), arguments, train_dataset=[{"rows": torch.ones(WIDTH)}] * 200).train()


train_plain() if KIND == "plain" else train_by_trainer()
