"""A model on several GPUs, a process each: `parallel.py ddp|fsdp1|tensor|pipeline|context [shapes]`."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

kind, rank = sys.argv[1], int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
size, layers, width, heads = dist.get_world_size(), 4, 128, 4
mesh = init_device_mesh("cuda", (size,), mesh_dim_names=("all",))


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.attend(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        return x + self.down(functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    """Of a stage of a pipeline: the first has the embedding, the last the head."""

    def __init__(self, first: int = 0, last: int = layers) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(512, width) if first == 0 else torch.nn.Identity()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(first, last))
        self.head = torch.nn.Linear(width, 512) if last == layers else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def step_of(model: torch.nn.Module):
    def step(ids: torch.Tensor) -> None:
        loss_of(model(ids), ids).backward()

    return step


def ddp():
    model = torch.nn.parallel.DistributedDataParallel(Model().cuda(), device_ids=[rank])
    return model, step_of(model)


def fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    precision = MixedPrecision(torch.bfloat16, torch.float32)
    model = FullyShardedDataParallel(
        Model().cuda(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision
    )

    def step(ids: torch.Tensor) -> None:
        loss_of(model(ids), ids).backward()
        model.clip_grad_norm_(1.0)

    return model, step


def tensor():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = Model().cuda()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, step_of(model)


def pipeline():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    each = layers // size
    model, device = Model(rank * each, (rank + 1) * each).cuda(), torch.device("cuda", rank)
    shapes = {}  # it asks its neighbours for them, or they are said, of one micro batch
    if sys.argv[2:] == ["shapes"]:
        ids, hidden, logits = (1, 128), (1, 128, width), (1, 128, 512)
        given = torch.empty(hidden, device="meta", requires_grad=True)
        first = torch.empty(ids, dtype=torch.int64, device="meta")
        last = torch.empty(logits, device="meta", requires_grad=True)
        shapes = {"input_args": given if rank else first, "output_args": given if rank < size - 1 else last}
    stage = PipelineStage(model, rank, size, device, **shapes)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)

    def step(ids: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=[])

    return model, step


def context():
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = Model().cuda()

    def step(ids: torch.Tensor) -> None:
        ids, labels = ids.clone(), ids.clone()
        sharded = context_parallel(mesh, buffers=(ids, labels), buffer_seq_dims=(1, 1))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharded, torch.autocast("cuda", torch.bfloat16):
            assert ids.shape[1] == 128 // size
            loss_of(model(ids), labels).backward()

    return model, step


model, step = {each.__name__: each for each in (ddp, fsdp1, tensor, pipeline, context)}[kind]()
optimizer = torch.optim.AdamW(model.parameters(), foreach=kind != "tensor")  # DTensors only in part
for _ in range(2):
    step(torch.randint(512, (4, 128), device="cuda"))
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank} of {size}: {kind}, peak {torch.cuda.max_memory_allocated()}\n", end="", flush=True)
dist.destroy_process_group()
