"""Collectives of small and large floats and integers, by two ranks: each gives what gloo gives on the CPU,
or a sentence says that nobody knows it.

Prints what was wrong, and last how many were true and how many were said to be unknown.
"""

import contextlib
import io

import torch
import torch.distributed as dist
import virtual_gpu_said

dist.init_process_group("cpu:gloo,cuda:nccl")
rank = dist.get_rank()
torch.cuda.set_device(rank)


def zeros(like, count):
    return [torch.zeros_like(like) for _ in range(count)]


def reduced_to_one(x):
    dist.reduce(x, 0)
    return x if rank == 0 else []  # gloo leaves what it added up on the way


def broadcast(x):
    dist.broadcast(x, 0)
    return x


def all_gathered(x):
    dist.all_gather(found := zeros(x, 2), x)
    return found


def gathered(x):
    found = zeros(x, 2) if rank == 0 else None
    dist.gather(x, found, 0)
    return found or []


def scattered(x):
    found = torch.zeros_like(x)
    dist.scatter(found, [x + 1, x + 2] if rank == 0 else None, 0)
    return found


def sent(x):
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return x


def reduced(operation):
    def run(x):
        dist.all_reduce(x, op=operation)
        return x

    return run


def into_one(collective, size):
    def run(x):
        collective(found := x.new_zeros(int(len(x) * size)), x)
        return found

    return run


COLLECTIVES = {
    "sum": reduced(dist.ReduceOp.SUM),
    "max": reduced(dist.ReduceOp.MAX),
    "reduce": reduced_to_one,
    "broadcast": broadcast,
    "all_gather": all_gathered,
    "all_gather_into_tensor": into_one(dist.all_gather_into_tensor, 2),
    "reduce_scatter_tensor": into_one(dist.reduce_scatter_tensor, 0.5),
    "all_to_all_single": into_one(dist.all_to_all_single, 1),
    "gather": gathered,
    "scatter": scattered,
    "send": sent,
}
true, unknown = [], []
for kind, elements in (
    (torch.float32, 4),
    (torch.int64, 4),
    (torch.float32, 1 << 12),
    (torch.int64, (1 << 21) + 2),
):
    for name, collective in COLLECTIVES.items():
        expected, found = (
            collective(torch.arange(1 + rank, elements + 1 + rank, dtype=kind).to(device))
            for device in ("cpu", "cuda")
        )
        virtual_gpu_said.said.clear()
        pairs = zip(*(each if isinstance(each, list) else [each] for each in (found, expected)), strict=True)
        with contextlib.redirect_stderr(io.StringIO()):
            same = all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)
        what = f"{name} of {elements} {kind}"
        if virtual_gpu_said.said:
            unknown.append(what)
        elif same:
            true.append(what)
        else:
            print("wrong:", rank, what)
objects = [None, None]
dist.all_gather_object(objects, "x" * (3 + 1000 * rank), group=dist.new_group(backend="nccl"))
if list(map(len, objects)) != [3, 1003]:
    print("wrong: objects of two sizes", objects)
# in one write: two ranks share the output
print(f"{rank} {len(true)} true {len(unknown)} unknown\n", end="", flush=True)
dist.destroy_process_group()
