"""Integers between two ranks, in every manner of torch.distributed, held against what they must be."""

import os

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

rank = int(os.environ["LOCAL_RANK"])
device, other = torch.device("cuda", rank), 1 - rank
torch.cuda.set_device(device)
dist.init_process_group("nccl")


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=device)


mine = integers(10 * rank + 1, 10 * rank + 2)
got = torch.empty_like(mine)
exchange = [dist.P2POp(dist.irecv, got, other), dist.P2POp(dist.isend, mine, other)]  # both receive first
for work in dist.batch_isend_irecv(exchange):
    work.wait()
assert got.tolist() == [10 * other + 1, 10 * other + 2]

said: list[object] = [{"rows": [1, 2, 3]}]
if rank == 0:
    dist.send(mine, 1)
    dist.send(mine + 5, 1)
    dist.send_object_list(said, 1)
else:
    both = torch.empty(4, dtype=torch.long, device=device)
    dist.recv(both[:2], 0)
    dist.recv(both[2:], 0)
    assert both.tolist() == [1, 2, 6, 7]
    heard: list[object] = [None]
    dist.recv_object_list(heard, 0)
    assert heard == said

sizes, back = ([1, 3], [1, 2]) if rank == 0 else ([2, 4], [3, 4])
source = torch.arange(sum(sizes), device=device) + 100 * rank
parts = torch.empty(sum(back), dtype=torch.long, device=device)
expected = [0, 100, 101] if rank == 0 else [1, 2, 3, 102, 103, 104, 105]
dist.all_to_all_single(parts, source, back, sizes)
assert parts.tolist() == expected
listed = [torch.empty(size, dtype=torch.long, device=device) for size in back]
dist.all_to_all(listed, list(source.split(sizes)))
assert torch.cat(listed).tolist() == expected

dist.scatter(got, [integers(1, 2), integers(3, 4)] if rank == 0 else None, src=0)
assert got.tolist() == [2 * rank + 1, 2 * rank + 2]
dist.reduce_scatter(got, [mine, mine * 2], op=dist.ReduceOp.MAX)
assert got.tolist() == [11 * (rank + 1), 12 * (rank + 1)]
for name, reduced in (("max", [11, 12]), ("sum", [12, 14])):
    assert functional.all_reduce(mine, name, dist.group.WORLD).tolist() == reduced
part: list[object] = [None]
dist.scatter_object_list(part, ["a", "b"] if rank == 0 else None, src=0)
assert part == ["ab"[rank]]
print(f"rank {rank}: all as it must be\n", end="", flush=True)
dist.destroy_process_group()
