"""A small loop; what happens in it is the argument."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

what = sys.argv[1] if len(sys.argv) > 1 else "nothing"
rank = int(os.environ.get("RANK", "0"))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
workers = 2 if what == "workers" else 0
loader = DataLoader(torch.randn(6 * 8 * (1 + rank), 32), batch_size=8 * (1 + rank), num_workers=workers)
for n, batch in enumerate(loader, 1):
    if what == "never backward":
        model(batch)
        continue
    loss = model(batch).square().mean()
    if n == 4 and what == "out of memory":
        torch.empty(2**60)
    if n == 4 and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
print("the program's own word:", what)
