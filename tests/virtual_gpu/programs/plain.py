"""A plain loop in the manner of nanoGPT: memory-mapped tokens, autocast, GradScaler, fused AdamW, compile if
asked."""

import sys

import numpy
import torch
from torch.nn import functional

torch.manual_seed(1)
numpy.random.default_rng(1).integers(0, 256, 100_000, dtype=numpy.uint16).tofile("train.bin")
width, length, batch = 128, 64, 8


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attend, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.view(len(x), -1, 4, width // 4).transpose(1, 2)
            for part in self.attend(self.first(x)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.second(x))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(256, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(2)))
        self.head = torch.nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.size(1), device=ids.device)
        logits = self.head(self.blocks(self.tokens(ids) + self.places(places)))
        return functional.cross_entropy(logits.view(-1, 256), targets.view(-1), ignore_index=-1)


def get_batch() -> tuple[torch.Tensor, ...]:
    data = numpy.memmap("train.bin", dtype=numpy.uint16, mode="r")
    starts = torch.randint(len(data) - length, (batch,))
    pair = [
        torch.stack(
            [torch.from_numpy(data[s + shift : s + shift + length].astype(numpy.int64)) for s in starts]
        )
        for shift in (0, 1)
    ]
    return tuple(each.pin_memory().to("cuda", non_blocking=True) for each in pair)


model = Model().to("cuda")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.amp.GradScaler("cuda", enabled=True)
run = torch.compile(model) if "compile" in sys.argv else model
for _ in range(3):
    ids, targets = get_batch()
    with torch.autocast("cuda", torch.float16):
        loss = run(ids, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
print(f"done: peak {torch.cuda.max_memory_allocated()} bytes, loss {loss.item()}, scale {scaler.get_scale()}")
model.to("cpu")  # as whoever exports it does: nothing of it is on the GPU when the process ends
