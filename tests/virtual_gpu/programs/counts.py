"""A loop that prints PyTorch's own counters, `counts.py KIND [STEPS]`: what a watched program is told."""

import os
import pickle
import sys

import torch
from torch import nn

kind, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 6
if kind == "records":
    torch.cuda.memory._record_memory_history(max_entries=100_000)
model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps):
    if kind == "resets":
        torch.cuda.reset_peak_memory_stats()
    if kind == "leaves" and step == 3:
        os._exit(7)
    if kind == "records later" and step == 3:
        torch.cuda.memory._record_memory_history(stacks="python")
    rows = 64_000 if kind == "grows" and step == 7 else 64
    rows = 1_000_000 if kind == "runs out" and step == 0 else rows
    model(torch.ones(rows, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    print(torch.accelerator.max_memory_allocated(), torch.cuda.memory_stats()["active_bytes.all.peak"])
if kind == "evaluates":
    model.eval()
    with torch.no_grad():
        model(torch.ones(8192, 1024, device="cuda"))
    print("evaluated", torch.cuda.max_memory_allocated())
if kind.startswith("records"):
    torch.cuda.memory._dump_snapshot("own.pickle")
    with open("own.pickle", "rb") as file:
        trace = pickle.load(file)["device_traces"][0]
    print([(entry["action"], entry["addr"], entry["size"], entry["user_metadata"]) for entry in trace])
    print("with stacks:", sum(bool(entry["frames"]) for entry in trace))
