"""torchtitan's Llama 3, trained as torchtitan trains it: its own model, checkpointing and units at the commit
that was measured, on PyTorch's FSDP2 of today.

What torchtitan's train.py does around them is stated here: weights are made after they are divided, the loss
is a mean in fp32, gradients are clipped to 1, AdamW goes through lists of tensors. Its logs have the peak of
the reserved bytes since training began.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
from torch.nn.functional import cross_entropy

from benchmarks.published.device import PLACE, Memory, counted
from harness.allocator.settings import Settings
from harness.hardware.hardware import find_hardware
from harness.simulate.kernels.attention_choice import CUDNN_DEPRIORITIZED

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
    """run_llama_train.sh of December 2024 sets expandable segments."""


JUNE = Run("titan-2406", ranks=8, batch=1, checkpointing="none")
DECEMBER = Run("titan-2412", ranks=8, batch=2, expandable=True)
ANOTHER_STEP = (
    "cause not found: the source reserved hardly more than the commit's own step allocates, though gathered "
    "and summed parts lie in pools of their own; its log does not say what was changed in the configuration"
)
OLD_PYTORCH = "PyTorch's selective checkpointing and FSDP2 of 2024 are not built here; cause not found"
RUNS = {
    "pt/132445": (JUNE, False, ANOTHER_STEP),
    "pt/129721": (JUNE, True, f"{ANOTHER_STEP}; the sum's input was in a pool of its own too"),
    "titan202412/8b/8/FSDP2": (DECEMBER, False, OLD_PYTORCH),
    "titan202412/8b/128/FSDP2": (replace(DECEMBER, ranks=128), False, OLD_PYTORCH),
}
"""By id of a row: what was run, whether the first step was measured, and why an answer is off."""


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
    config.norm_type, config.vocab_size, config.max_seq_len = "rmsnorm", VOCABULARY, run.seq_len
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
