"""Collectives of a simulated GPU: their time on the links, and the tensors that PyTorch keeps for them."""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from harness.hardware import GPUS_PER_NODE, NETWORK, Collective
from harness.kernel_time import collective
from harness.simulate.clock import SimulatedTime
from harness.simulate.cuda.shape_cache import tensors_in

KINDS: dict[str, Collective] = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
}
WAIT = "_c10d_functional::wait_tensor"
NCCL_STREAM = -1
"""The stream of asynchronous collectives. No memory is allocated on it."""
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""PyTorch's environment variable. If true there is no watchdog, and no tensors are kept after waiting."""


class Communication:
    """The collectives that a rank launches, their time, and the memory that PyTorch keeps for them.

    DDP's first step has one bucket for all gradients. PyTorch keeps the tensors of a collective until its
    watchdog, which looks every 100 ms, has seen it end, and then until the next collective
    (csrc/distributed/c10d/ProcessGroupNCCL.cpp, WorkNCCL's shelf). So when the second step makes new buckets
    the first one may still be there: here it is, until that step's backward. Where PyTorch is told to run
    without a watchdog, nothing is kept. `clocks` are the rank's own, and those of other devices.
    """

    def __init__(self, *clocks: SimulatedTime) -> None:
        self.clocks = clocks
        self._steps = 0
        self._kept: list[Tensor] = []
        self._not_waited: dict[int, Tensor] = {}
        """Results of functional collectives that nobody has waited for yet, by storage. PyTorch's
        WorkRegistry (csrc/distributed/c10d/Functional.cpp) keeps them until someone does. Nobody does where a
        checkpointed block runs again and stops at the last tensor that backward needs: a sum of a tp group
        that was launched before that leaks (pytorch/torchtitan#2763)."""
        self._watched = os.environ.get(BLOCKING_WAIT, "").lower() not in ("1", "t", "true", "y", "yes")

    def begin_step(self) -> None:
        """Count a step."""
        self._steps += 1

    def launched(self, name: str, args: Any, out: Any, *, timed: bool) -> None:
        """Note that the collective called `name` ("c10d::allreduce_") was launched on the current stream."""
        if not all(tensor.is_meta for tensor in tensors_in(args)):
            return  # the host's own: gloo's
        if name.startswith("_c10d_functional::"):
            self._not_waited[out.untyped_storage()._cdata] = out
        if timed:
            size_bytes = max((t.nbytes for t in tensors_in([*args, out])), default=0)
            self._communicate(KINDS[name], size_bytes, _group(args), self.clocks[0].stream)

    def waited(self, result: Tensor) -> None:
        """Note that someone has waited for the result of a functional collective."""
        self._not_waited.pop(result.untyped_storage()._cdata, None)

    @property
    def not_waited(self) -> list[Tensor]:
        """Results of functional collectives that nobody has waited for."""
        return list(self._not_waited.values())

    def summed(self, group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """DDP's hook: sum a bucket of gradients on NCCL's stream, and wait for that after backward."""
        gradients = bucket.buffer()
        if self._steps == 1 and self._watched:
            self._kept.append(gradients)
        else:
            self._kept.clear()
        self._communicate("all_reduce", gradients.nbytes, group, NCCL_STREAM)
        torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(gradients)
        return future

    def with_sums(self, reducer: Callable[..., Any]) -> Callable[..., Any]:
        """DDP's class Reducer with the hook `summed`, since collectives of a `fake` group have no results."""

        def with_hook(parameters: Any, buckets: Any, limits: Any, group: Any, *others: Any) -> Any:
            made = reducer(parameters, buckets, limits, group, *others)
            distributed._register_comm_hook(made, group, self.summed)
            return made

        return with_hook

    def _wait(self) -> None:
        """Let the default stream wait for NCCL's."""
        for clock in self.clocks:
            clock.wait(0, clock.done_s(NCCL_STREAM))

    def _communicate(self, kind: Collective, size_bytes: int, group: Any, stream: int) -> None:
        """Let every clock take the time of a collective of this size among the ranks of `group`."""
        ranks = distributed.get_process_group_ranks(group)
        on_one_node = min(Counter(rank // GPUS_PER_NODE for rank in ranks).values())
        for clock in self.clocks:
            seconds = collective(
                clock.hardware, kind, size_bytes, len(ranks), on_one_node, network=NETWORK.value
            )
            clock.communicate(seconds, stream)


def _group(args: Any) -> Any:
    """The process group among an operator's arguments: an object of C++, or its name (the last one)."""
    if isinstance(args[-1], str):
        return distributed.distributed_c10d._resolve_process_group(args[-1])
    return distributed.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
