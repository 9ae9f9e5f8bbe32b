"""FSDP2's CPU offload on shape-only tensors: a rank's parts of the weights are in host memory.

A shape-only tensor is on no CPU, so `on_host()` marks those that should be there: a rank's parts, and their
gradients as soon as they are summed. Parts are on `meta`, which is not FSDP2's `meta:0`, so that its own
`.to()` copies each part that is gathered.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness.system import Replacement, nothing
from harness.training import to_host

PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam"
GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
CPU = torch.device("cpu")


def host_replacements() -> Iterator[Replacement]:
    """The functions of FSDP2 that move parts to and from the CPU (_fsdp_param.py, _fsdp_collectives.py)."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    init: Callable[..., None] = FSDPParam._init_sharded_param
    to: Callable[..., Tensor] = torch.Tensor.to

    @torch.no_grad()
    def init_on_host(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self.offload_to_cpu:
            part = self.sharded_param._local_tensor
            host = to_host(self._sharded_param_data.view(self.padded_sharded_param_size))
            self._sharded_param_data = host.view(-1)
            dim = self.fsdp_placement.dim
            self.sharded_param._local_tensor = host.narrow(dim, 0, part.size(dim))
            self.pin_memory = False  # pinning needs a tensor on the CPU

    def to_cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to_host(self) if self.is_meta and args and args[0] == CPU else to(self, *args, **kwargs)

    yield Replacement(f"{PARAM}._init_sharded_param", init_on_host, "a part moves to the CPU")
    yield Replacement("torch.Tensor.to", to_cpu, "a summed gradient moves to the CPU")
    yield Replacement(f"{GROUP}._validate_cpu_offload_params", nothing, "looks for the CPU")
