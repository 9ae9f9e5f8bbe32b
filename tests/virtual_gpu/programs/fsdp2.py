"""A loop over FSDP2 as a user writes it: bf16 over fp32, checkpointing, clipping, AdamW, token counts
reduced."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self, vocabulary: int = 512, width: int = 256) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(4))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
model = Model().cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    ids = torch.randint(512, (4, 128)).cuda()
    labels = ids.clone()
    labels[:, : 10 * (rank + 1)] = -100
    tokens = (labels != -100).sum()
    dist.all_reduce(tokens)
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    (loss * size / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
names = [None] * size
dist.all_gather_object(names, f"rank {rank}")
said = [f"from {rank}"]
dist.broadcast_object_list(said, src=0)
print(
    f"rank {rank} of {size}: tokens {tokens.item()}, peak {torch.cuda.max_memory_allocated()}, "
    f"reserved {torch.cuda.max_memory_reserved()}, {names[-1]}, {said[0]}\n",
    end="",  # in one write: two ranks share the output
    flush=True,
)
dist.destroy_process_group()
