"""Programs as their authors ship them, tiny: commands of TRL, accelerate, torchtune and LitGPT, and PEFT's
example (benchmarks/virtual_gpu/programs.py, which runs them at full size too)."""

import json
from pathlib import Path

import pytest

from benchmarks.virtual_gpu import checkpoint, programs

pytestmark = pytest.mark.virtual_gpu
ALIKE = {name for name in programs.PROGRAMS if name.startswith(("trl sft", "trl dpo")) or name.endswith("3B")}
"""Each as another here or in test_programs.py."""
LACKING = {
    "PEFT examples/dora_finetuning",
    "torchtitan, llama3_debugmodel",
    "LLaMA-Factory, qwen3_lora_sft.yaml",
    "Axolotl, llama-3/lora-1b.yml",
}
"""They do not come to their end with the releases that the others need: the guide has the reasons."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in programs.PROGRAMS if name not in ALIKE | LACKING])
def test_a_program_as_it_is_shipped(name: str, tmp_path: Path) -> None:
    if reason := programs.missing(name):
        pytest.skip(f"{reason} (the docstring of benchmarks.virtual_gpu.programs says how to get it)")
    row = programs.run(name, "tiny", "h100", tmp_path)
    program = programs.PROGRAMS[name]
    assert row["failed"] is None
    alone = program.world_size is not None or name.endswith("DataParallel")
    assert len(row["processes"]) == (1 if alone else program.gpus)
    for process in row["processes"]:
        assert 0 < process["peak_allocated_bytes"] <= process["peak_reserved_bytes"]
    assert (tmp_path / "trained").is_dir() or "trained" not in row["command"]


def test_asking_for_torch_is_not_importing_it(emulate) -> None:
    """TRL's scripts ask whether packages are there before they import any."""
    code = """
from importlib.util import find_spec
assert find_spec("torch") and find_spec("torch")
import torch
print((torch.arange(5).cuda() * 2).sum().item())
"""
    assert emulate(code=code).stdout.strip() == "20"


def test_a_checkpoint_takes_no_place_on_the_disk(tmp_path: Path) -> None:
    checkpoint.hugging_face(programs.TINY, tmp_path)
    weights = tmp_path / "model.safetensors"
    parameters = 2 * 128256 * 64  # of the embedding and of the head, most of it
    assert weights.stat().st_size > 2 * parameters
    assert 512 * weights.stat().st_blocks < 1 << 20


@pytest.mark.parametrize("kind", checkpoint.ROWS)
def test_rows_are_longer_than_what_is_asked(kind: str, tmp_path: Path) -> None:
    checkpoint.rows(kind, tmp_path, count=3, length=64)
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert lines == json.loads((tmp_path / "rows.json").read_bytes())
    assert len(lines) == 3
    for row in lines:
        question = row.get("prompt") or row.get("instruction") or row["text"]
        assert len(question) < 64 or kind == "texts"
        assert kind == "prompts" or sum(map(len, row.values())) > 64
