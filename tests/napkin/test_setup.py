"""What setup holds at most, against PyTorch's allocator: recordings of its CUDA build on virtual GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_programme.trace_file import load_trace
from benchmarks.traces import RECORDINGS, hardware_of
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe import Recipe

RECORDED = [
    path
    for path in sorted(RECORDINGS.glob("virtual_gpu/h200/*.json.gz"))
    if not path.name.startswith("random")
]
BLOCKS_BYTES = 4096
"""By which the allocator rounds what is nearly nothing: the buffers of a model in host memory."""


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name[:-8])
def test_the_peak_of_setup_is_the_recorded_one(path: Path, tmp_path: Path) -> None:
    trace = load_trace(path)
    recorded = max(phase["allocated_bytes.all.peak"] for phase in trace.phases if phase["step"] < 0)
    memory = predict(trace.recipe(tmp_path), hardware_of(trace)).memory
    assert memory.setup_peak_allocated_bytes == pytest.approx(recorded, rel=0.005, abs=BLOCKS_BYTES)


def test_there_is_every_way_to_divide_a_model() -> None:
    names = " ".join(path.name for path in RECORDED)
    assert all(f"ranks-{engine}-" in names for engine in ("ddp", "fsdp", "tp", "fsdp+tp"))


def test_of_untied_weights_the_head_is_made_last() -> None:
    """Llama-3.1-8B in bf16 on 8 ranks of tp: 32 blocks of 218,103,808 weights and two norms, embeddings and
    head of 128,256 * 4096. The last whole layer is the head, beside all parts; norms are whole."""
    recipe = Recipe(model="llama-3.1-8b", precision="bf16", seq_len=8, parallel="tp", tp=8)
    head = 128_256 * 4096
    parts = (32 * 218_103_808 + 2 * head) // 8 + 65 * 4096
    memory = predict(recipe, find_hardware("h100")).memory
    assert memory.setup_peak_allocated_bytes == pytest.approx(2 * (parts + head), rel=1e-6)
