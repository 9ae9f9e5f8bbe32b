"""One rank of many, simulated without the others.

torch's own engines run unchanged. The `fake` process group has the number of ranks and no other process; its
collectives return at once. FSDP2 finds the streams of a device in the module `torch.meta` (streams.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed

from harness.errors import InputError
from harness.simulate.cuda.communication import Communication
from harness.simulate.cuda.fsdp_on_host import host_replacements
from harness.simulate.cuda.streams import Streams
from harness.system import Replacement, all_replaced, nothing, replaced


@contextmanager
def one_rank(rank: int, world_size: int, streams: Streams, communication: Communication) -> Iterator[None]:
    """Inside, this process is `rank` of `world_size` ranks, with these streams and collectives.

    Raises InputError in a rank of a real run, which has a process group already.
    """
    if distributed.is_initialized():
        raise InputError(
            "a rank of a run cannot simulate another. Simulate before it, or in a process of its own."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        current = replaced(torch.accelerator, "current_stream", streams.current_stream)
        with replaced(torch, "meta", streams), current, all_replaced(_replacements(communication)):
            yield
    finally:
        distributed.destroy_process_group()


def _replacements(communication: Communication) -> Iterator[Replacement]:
    """Functions of FSDP2, DDP and DTensor that need a device, other ranks, or much time."""
    group = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
    yield Replacement(f"{group}._validate_no_meta_params", nothing, "refuses weights that are only shapes")
    verify = "torch.nn.parallel.distributed._verify_param_shape_across_processes"
    yield Replacement(verify, nothing, "reads back what other ranks have sent")
    statistics = "torch.distributed.Logger.set_runtime_stats_and_log"
    yield Replacement(statistics, nothing, "warns that it cannot time a device that is not there")
    reducer = communication.with_sums(distributed.Reducer)
    yield from host_replacements()
    from torch.distributed.tensor import _sharding_prop as propagation

    if marks := getattr(propagation, "_propagate_use_strided_shard_flag", None):  # since PyTorch 2.12
        why = "looks through a whole list for each tensor in it: 40 % of the time that a 405B model takes"
        yield Replacement(f"{propagation.__name__}.{marks.__name__}", _if_strided(marks), why)
    yield Replacement("torch.distributed.Reducer", reducer, "needs results, and `fake` sums have none")


def _if_strided(propagate: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`propagate(strategy, schema)`, called only where an argument of the schema has a strided part, since it
    does nothing otherwise. Whether one has is found once for each schema."""
    from torch.distributed.tensor.placement_types import _StridedShard

    seen: tuple[Any, bool] = None, False

    def propagate_if_strided(strategy: Any, schema: Any) -> None:
        nonlocal seen
        if schema is not seen[0]:
            placements = (placement for spec in schema.args_spec for placement in spec.placements)
            seen = schema, any(isinstance(placement, _StridedShard) for placement in placements)
        if seen[1]:
            propagate(strategy, schema)

    return propagate_if_strided
