"""A training program that records its memory in one of several ways, and tells what PyTorch counts.

usage: recorded.py HOW OUT [STEPS]; HOW: all | cpp | state | none | short | oom | pieces | two | leak
"""

import json
import sys

import torch

HOW, OUT = sys.argv[1:3]
RECORDED = {
    "cpp": {"stacks": "all"},
    "state": {"enabled": "state", "stacks": "python"},
    "short": {"stacks": "python", "max_entries": 60},
}
counted = {}


def count(device=0):
    stats = torch.cuda.memory_stats(device)
    return {name: stats[f"{name}_bytes.all.current"] for name in ("allocated", "reserved")}


def on_oom(device, requested, total, free):
    counted["oom"] = {"requested": requested, "free": torch.cuda.mem_get_info(device)[0], **count(device)}
    torch.cuda.memory._dump_snapshot(OUT)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def load_batch(rows):
    return torch.randn(rows, 1024, device="cuda")


def train(steps, rows, kept):
    model = torch.nn.Sequential(*[Block(1024) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        output = model(load_batch(rows))
        loss = output.pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if HOW == "leak":
            kept.append(output.detach().clone())
    return model, optimizer


def in_pieces(kept):
    """The device in segments of 1 GiB, the half of each in use; then more than any half."""
    whole = [torch.empty(2**28, device="cuda") for _ in range(torch.cuda.mem_get_info()[0] // 2**30)]
    count_of_halves = 2 * len(whole)
    del whole  # the allocator keeps the segments
    halves = [torch.empty(2**27, device="cuda") for _ in range(count_of_halves)]
    kept += halves[::2]
    del halves
    return torch.empty(3 * 2**28, device="cuda")


torch._C._cuda_attach_out_of_memory_observer(on_oom)
if HOW != "none":
    torch.cuda.memory._record_memory_history(**RECORDED.get(HOW, {"stacks": "python"}))
kept = []
try:
    if HOW == "pieces":
        in_pieces(kept)
    else:
        alive = train(steps=5, rows=2**20 if HOW == "oom" else 256, kept=kept)
        if HOW == "two":
            kept.append(torch.empty(2**20, device="cuda:1"))
            counted["second"] = count(1)
    counted["end"] = count()
    torch.cuda.memory._dump_snapshot(OUT)
except torch.OutOfMemoryError:
    pass
print(json.dumps(counted))
