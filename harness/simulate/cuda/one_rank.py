"""One rank of many, alone: the process group answers for the others, and FSDP finds a GPU.

torch's own engines run as they are. The `fake` process group has every rank's number and no other process;
its collectives return at once. What FSDP2 asks of a device it finds in the module `torch.meta` (streams.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from harness.errors import InputError
from harness.simulate.cuda.streams import Streams
from harness.simulate.replacement import Replacement, all_replaced, replaced


@contextmanager
def one_rank(rank: int, world_size: int, streams: Streams) -> Iterator[None]:
    """Inside, this process is `rank` of `world_size`, and the GPU's streams are `streams`.

    Raises InputError where there is a process group already: a rank of a real run.
    """
    if distributed.is_initialized():
        raise InputError("a rank of a run cannot simulate another. Simulate before it, or in a process of its own.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    group = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._validate_no_meta_params"
    why = "refuses weights that are only shapes"
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with replaced(torch, "meta", streams), all_replaced([Replacement(group, lambda _: None, why)]):
            yield
    finally:
        distributed.destroy_process_group()
