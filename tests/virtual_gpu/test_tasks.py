"""TRL's own trainers on the virtual GPU take what a recipe's `task` is simulated to take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.hardware import find_hardware
from harness.recipe import Recipe
from harness.simulate import simulate
from tests.support.places import MODELS
from tests.virtual_gpu.conftest import Emulate

pytestmark = pytest.mark.virtual_gpu
PROGRAM = Path(__file__).parent / "programs" / "dpo.py"
MODEL = str(MODELS / "llama.json")
PAIRS, TOKENS = 4, 128
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora checkpointing": {"adapter": "lora", "gradient_checkpointing": True},
    "precomputed": {"dpo_reference": "precomputed"},
}


@pytest.mark.parametrize("kind", ["full", *(pytest.param(k, marks=pytest.mark.slow) for k in [*KINDS][1:])])
def test_dpo_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """But for what Trainer keeps besides: a mask of the padding and one of the answers in the place of
    labels, and three numbers: the losses together, the last loss, and the last norm of the gradients."""
    printed = emulate(sys.executable, str(PROGRAM), MODEL, *kind.split()).stdout
    theirs = int(printed.rpartition("done: peak ")[2].split()[0])
    recipe = Recipe(
        model=MODEL,
        task="dpo",
        micro_batch_size=PAIRS,
        seq_len=TOKENS,
        max_grad_norm=1.0,
        **KINDS[kind],
    )
    profile, _ = simulate(recipe, find_hardware("h100"))
    ours = profile.memory.peak_allocated_bytes
    assert ours is not None
    assert theirs - ours == 2 * PAIRS * TOKENS * 8 + 3 * 512
