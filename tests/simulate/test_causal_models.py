"""A sample of benchmarks.causal_models: the peaks that PyTorch's allocator counted on the virtual GPU."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.causal_models.__main__ import versions
from tests.support.emulated_peaks import check_peaks
from tests.support.long import alone, but_for

FOUND = json.loads((Path(__file__).parents[2] / "profiles/cpu/causal_models.json").read_bytes())
METHODS = json.loads((Path(__file__).parents[2] / "profiles/cpu/methods.json").read_bytes())
ROWS = {(row["type"], row["method"]): row for row in [*FOUND["rows"], *METHODS["rows"]]}
SAMPLE = (
    *("deepseek_v3", "diffllama", "doge", "ernie4_5_moe", "gemma3_text", "gpt_oss", "granite_swa"),
    *("inkling_text", "llama4_text", "mamba2", "nemotron_h", "phimoe", "qwen3_next"),
)
"""Mixtures, recurrent layers, attention that is its own, weights kept in fp32; each of two ways in turn."""
OF_LLAMA = (
    *("dora", "dora nf4", "lora+", "vera", "dpo", "dpo lora", "dpo precomputed"),
    *("liger", "liger lora", "linear_cross_entropy", "linear_cross_entropy lora", "fused_lm_head"),
    *("fused_lm_head lora", "orpo", "orpo mixed", "grpo", "grpo lora", "kto", "kto lora", "kto precomputed"),
    *("reward", "reward mixed", "embedding", "embedding lora", "classification lora", "classification nf4"),
)
METHODS_OF_LLAMA = {f"llama {method}": ("llama", method) for method in OF_LLAMA}
SAMPLED = {f"{kind} {how}": (kind, how) for kind, how in zip(SAMPLE, itertools.cycle(["full", "lora"]))}
OTHERS = {"mixtral experts": ("mixtral", "experts")}
BAR = 0.95

pytestmark = pytest.mark.skipif(
    versions() != FOUND["versions"], reason="the emulated peaks are of other releases"
)


@pytest.mark.parametrize(
    "asked", but_for({*SAMPLED, *OTHERS, *alone(METHODS_OF_LLAMA)}, SAMPLED | OTHERS | METHODS_OF_LLAMA)
)
def test_the_peaks_are_those_that_pytorch_counted(asked: tuple[str, str], tmp_path: Path) -> None:
    kind, method = asked
    check_peaks(ROWS[kind, method]["emulated"], kind, method, tmp_path)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_nearly_all_that_train_are_simulated_to_the_byte(method: str) -> None:
    trained = [row for row in FOUND["rows"] if row["method"] == method and "builds" not in row]
    trained = [row for row in trained if "trains" not in row]
    assert len(trained) > 120
    assert sum(_same(row) for row in trained) >= BAR * len(trained)


def _same(row: dict[str, Any]) -> bool:
    return isinstance(row.get("simulated"), dict) and row["apart"]["allocated"] == 0
