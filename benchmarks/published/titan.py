"""torchtitan's Llama 3, trained as torchtitan trains it: its own model, checkpointing and units at the commit
that was measured, on PyTorch's FSDP2 of today.

What torchtitan's train.py does around them is stated here: weights are made after they are divided, the loss
is a mean in fp32, gradients are clipped to 1, AdamW goes through lists of tensors. Its logs have the peak of
the reserved bytes since training began.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.nn.functional import cross_entropy

from benchmarks.published.device import PLACE, Memory, counted
from harness.allocator.settings import Settings
from harness.hardware.hardware import find_hardware
from harness.kernels import CUDNN_DEPRIORITIZED

COMMITS = {"titan-2406": "1ec2ece51", "titan-2412": "9dec370a"}
"""By name of the checkout: the one before the logs of 2024-06-27, and the one that the table names."""
VOCABULARY = 128256
"""Of the tokenizer of Llama 3, which train.py asks for it."""
STEPS = 3
MOCKED = ("tomli", "torchtitan.datasets", "torchtitan.parallelisms.pipelining_utils")
"""What the modules import and do not use here."""


@dataclass(frozen=True)
class Run:
    """What a run of train.py was told."""

    checkout: str
    ranks: int
    batch: int
    seq_len: int = 8192
    checkpointing: str = "selective"
    """Mode of [activation_checkpoint]; selective goes operator by operator."""
    expandable: bool = False
    """Whether PyTorch's allocator was told expandable_segments:True."""
    norm: str = "rmsnorm"
    """The [model] norm_type."""
    sums_apart: bool = False
    """The input of a reduce-scatter in the pool of its stream, as in FSDP2 before pytorch#129721."""


JUNE = Run("titan-2406", ranks=8, batch=1, checkpointing="none")
DECEMBER = Run("titan-2412", ranks=8, batch=2)
"""On more than one machine, multinode_trainer.slurm sets nothing for the allocator."""
UNTOLD = {"norm": "fused_rmsnorm", "expandable": True}
IN_WORDS = "norm_type fused_rmsnorm and expandable segments, of which the log says neither yes nor no"
NOT_TOLD = f"the log does not say what was changed in the configuration. With {IN_WORDS}, it would be"
RUNS = {
    "pt/132445": (JUNE, False),
    "pt/129721": (replace(JUNE, sums_apart=True), True),
    "titan202412/8b/8/FSDP2": (DECEMBER, False),
    "titan202412/8b/128/FSDP2": (replace(DECEMBER, ranks=128), False),
}
"""By id of a row: what was run, and whether the first step was measured."""


def untold(run: Run) -> Run | None:
    """The run with what its source may have changed without a word; None where it says enough."""
    return replace(run, **UNTOLD) if run.checkout == JUNE.checkout else None


def told(row: str) -> dict[str, Any] | None:
    """What the run of a row was told; None if it is none of torchtitan's."""
    return {"torchtitan": asdict(RUNS[row][0])} if row in RUNS else None


@dataclass(frozen=True)
class Peaks:
    """In bytes, since training began."""

    first_reserved: int
    reserved: int
    allocated: int


@cache
def peaks(checkout: Path, run: Run, gpu: str) -> Peaks:
    """Of the first rank: after one step, and after STEPS."""
    flash_first = patch.dict(os.environ, {CUDNN_DEPRIORITIZED: "1"})  # as PyTorch chose then
    with (
        flash_first,
        _imported(checkout) as (llama, parallelize),
        _sums_apart() if run.sums_apart else nullcontext(),
        _without_triton(find_hardware(gpu).sm_count) if run.norm == "fused_rmsnorm" else nullcontext(),
        counted(find_hardware(gpu), None, Settings(expandable_segments=run.expandable), run.ranks) as (
            memory,
            device,
        ),
    ):
        model = _divided(llama, parallelize, run)
        with device:
            model.to_empty(device=PLACE)
            with torch.no_grad():
                model.init_weights()
            return _trained(memory, model.train(), run)


def _trained(memory: Memory, model: nn.Module, run: Run) -> Peaks:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True
    )
    memory.reset_peak()
    first = 0
    for step in range(STEPS):
        ids, labels = (
            torch.zeros(run.batch, run.seq_len, dtype=torch.int64, device="cpu").to(PLACE) for _ in range(2)
        )
        optimizer.zero_grad()
        predicted = model(ids)
        loss = cross_entropy(predicted.flatten(0, 1).float(), labels.flatten(0, 1))
        del predicted
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        first = first if step else memory.peak_reserved_bytes
    return Peaks(first, memory.peak_reserved_bytes, memory.peak_bytes)


def _divided(llama: ModuleType, parallelize: ModuleType, run: Run) -> nn.Module:
    """The model, of shapes alone."""
    config = llama.llama3_configs["8B"]
    config.norm_type, config.vocab_size, config.max_seq_len = run.norm, VOCABULARY, run.seq_len
    with torch.device("meta"):
        model = llama.Transformer.from_model_args(config)
    job = SimpleNamespace(
        activation_checkpoint=SimpleNamespace(mode=run.checkpointing, selective_ac_option="op"),
        training=SimpleNamespace(mixed_precision_param="bfloat16", mixed_precision_reduce="float32"),
    )
    mesh = init_device_mesh(PLACE.type, (run.ranks,), mesh_dim_names=("dp",))
    if hasattr(parallelize, "apply_dp"):  # June 2024
        if run.checkpointing != "none":
            parallelize.apply_ac(model, job)
        parallelize.apply_dp(model, mesh, SimpleNamespace(pp_enabled=False), job)
    else:
        if run.checkpointing != "none":
            parallelize.apply_ac(model, job.activation_checkpoint)
        parallelize.apply_fsdp(model, mesh, torch.bfloat16, torch.float32, pp_enabled=False)
    return model


@contextmanager
def _imported(checkout: Path) -> Iterator[tuple[Any, Any]]:
    """torchtitan.models.llama and torchtitan.parallelisms.parallelize_llama of a checkout."""
    package = ModuleType("torchtitan.parallelisms")
    package.__path__ = [str(checkout / "torchtitan" / "parallelisms")]  # without its own imports
    mocked: dict[str, Any] = {name: MagicMock() for name in MOCKED}
    mocked["torchtitan.parallelisms"] = package
    sys.modules.update(mocked)
    sys.path.insert(0, str(checkout))
    try:
        yield (
            import_module("torchtitan.models.llama"),
            import_module("torchtitan.parallelisms.parallelize_llama"),
        )
    finally:
        sys.path.remove(str(checkout))
        for name in [name for name in sys.modules if name in mocked or name.startswith("torchtitan")]:
            del sys.modules[name]


@contextmanager
def _sums_apart() -> Iterator[None]:
    """FSDP2 takes the input of a reduce-scatter from its stream's pool, and gives it back when it is sent."""
    of_group = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    reduce, allocate = of_group.foreach_reduce, collectives.DefaultReduceScatter.allocate
    apart: list[Any] = []

    def reduce_apart(params: Any, grads: Any, group: Any, stream: Any, *args: Any) -> tuple[Any, ...]:
        apart[:] = [stream]
        _, *others = reduce(params, grads, group, stream, *args)
        return None, *others

    def allocate_apart(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with getattr(torch, PLACE.type).stream(*apart):
            return allocate(self, *args, **kwargs)

    with (
        patch.object(of_group, "foreach_reduce", reduce_apart),
        patch.object(collectives.DefaultReduceScatter, "allocate", allocate_apart),
    ):
        yield


class _NoKernel:
    """A Triton kernel that does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def _without_triton(sm_count: int) -> Iterator[None]:
    """The fused norm's operators without its two kernels, which allocate nothing."""
    norms = import_module("torchtitan.models.norms")
    properties = SimpleNamespace(multi_processor_count=sm_count)
    kernel = _NoKernel()  # no mock, which would keep the tensors that it is called with
    with (
        patch.multiple(norms, _rms_norm_fwd_kernel=kernel, _rms_norm_bwd_kernel_sm=kernel),
        patch("torch.cuda.get_device_properties", lambda _: properties),
    ):
        yield
