"""A sample of benchmarks.causal_models, with --vision too: the peaks that PyTorch's allocator counted on the
virtual GPU."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.causal_models.__main__ import GPU, config_file, models_that_see, versions
from benchmarks.causal_models.steps import recipe_of
from benchmarks.causal_models.vision import VISION_METHODS
from benchmarks.traces import THREE_STEPS
from harness.hardware import find_hardware
from harness.simulate import simulate
from tests.support.long import alone, but_for
from tests.support.places import ROOT


def _found(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "profiles/cpu" / name).read_bytes())


FOUND, SEEING = _found("causal_models.json"), _found("vision_models.json")
SEEN = {(row["type"], row["method"]): row for row in SEEING["rows"]}
ROWS = {(row["type"], row["method"]): row for row in [*FOUND["rows"], *_found("methods.json")["rows"]]} | SEEN
SAMPLE = (
    *("deepseek_v3", "diffllama", "doge", "ernie4_5_moe", "gemma3_text", "gpt_oss", "granite_swa"),
    *("inkling_text", "llama4_text", "mamba2", "nemotron_h", "phimoe", "qwen3_next"),
)
"""Mixtures, recurrent layers, attention that is its own, weights kept in fp32; each of two ways in turn."""
OF_LLAMA = (
    *("dora", "dora nf4", "lora+", "vera", "dpo", "dpo lora", "dpo precomputed"),
    *("liger", "liger lora", "linear_cross_entropy", "linear_cross_entropy lora", "fused_lm_head"),
    *("fused_lm_head lora", "orpo", "orpo mixed", "kto", "kto lora", "kto precomputed"),
    *("grpo", "grpo lora", "grpo reference", "grpo reference lora"),
    *("vblora", "tinylora", "waveft", "pissa", "pissa base", "olora nf4", "mica"),
    *("reward", "reward mixed", "embedding", "embedding lora", "classification lora", "classification nf4"),
)
METHODS_OF_LLAMA = {f"llama {method}": ("llama", method) for method in OF_LLAMA}
SAMPLED = {f"{kind} {how}": (kind, how) for kind, how in zip(SAMPLE, itertools.cycle(["full", "lora"]))}
OTHERS = [
    *(("mixtral", "experts"), ("gemma3", "images lora"), ("gemma3", "images and tower"), ("llava", "images")),
    *(("mistral3", "images lora"), ("qwen2_5_vl", "images"), ("qwen2_5_vl", "images lora")),
    ("llava_next", "images lora"),
    *(("qwen2_5_vl", "text alone"), ("qwen3_vl", "images and tower")),
]
USUAL = SAMPLED | {f"{kind} {method}": (kind, method) for kind, method in OTHERS}
BAR = 0.95

pytestmark = pytest.mark.skipif(
    versions() not in (FOUND["versions"], SEEING["versions"]),
    reason="the emulated peaks are of other releases",
)


@pytest.mark.parametrize("asked", but_for({*USUAL, *alone(METHODS_OF_LLAMA)}, USUAL | METHODS_OF_LLAMA))
def test_the_peaks_are_those_that_pytorch_counted(asked: tuple[str, str], tmp_path: Path) -> None:
    config = config_file(asked[0], tmp_path)
    assert isinstance(config, Path), config
    recipe = recipe_of(config, asked[1]).model_copy(update=THREE_STEPS)
    memory, emulated = simulate(recipe, find_hardware(GPU))[0].memory, ROWS[asked]["emulated"]
    assert memory.first_step_peak_allocated_bytes == emulated["first step"]
    assert memory.peak_allocated_bytes == emulated["allocated"]
    assert memory.peak_reserved_bytes == emulated["reserved"]


def test_triton_measures_the_kernels_of_experts_once(tmp_path: Path) -> None:
    """In each simulation of a process. The virtual GPU counts no tokens of an expert, and so has no tiles of
    them. A simulation has one in each of two layers, which takes two blocks."""
    config, emulated = config_file("mixtral", tmp_path), ROWS["mixtral", "liger experts"]["emulated"]
    assert isinstance(config, Path), config
    recipe = recipe_of(config, "liger experts").model_copy(update=THREE_STEPS)
    tiles = 2 * 2 * 512
    for _ in range(2):
        profile = simulate(recipe, find_hardware(GPU))[0]
        memory = profile.memory
        assert memory.first_step_peak_allocated_bytes == emulated["first step"] + tiles
        assert memory.peak_allocated_bytes == emulated["allocated"] + tiles
        assert memory.peak_reserved_bytes == emulated["reserved"]
        assert any("no estimate of time knows" in warning for warning in profile.warnings)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_nearly_all_that_train_are_simulated_to_the_byte(method: str) -> None:
    trained = [row for row in FOUND["rows"] if row["method"] == method and "builds" not in row]
    trained = [row for row in trained if "trains" not in row]
    assert len(trained) > 120
    assert sum(_same(row) for row in trained) >= BAR * len(trained)


def _same(row: dict[str, Any]) -> bool:
    return isinstance(row.get("simulated"), dict) and row["apart"]["allocated"] == 0


def test_every_type_whose_processor_is_known_is_in_the_table() -> None:
    assert {kind for kind, _ in SEEN} == {*models_that_see()}
    assert {method for _, method in SEEN} == {*VISION_METHODS}


@pytest.mark.parametrize("method", ["images", "images lora", "text alone"])
def test_with_a_frozen_tower_all_are_the_same_to_the_byte(method: str) -> None:
    trained = [row for (_, each), row in SEEN.items() if each == method and "trains" not in row]
    assert len(trained) > 8
    for row in trained:
        assert isinstance(row.get("simulated"), dict), row
        assert row["apart"]["allocated"] == row["apart"]["first step"] == 0, row
