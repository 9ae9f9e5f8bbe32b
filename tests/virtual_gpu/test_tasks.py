"""TRL's own trainers on the virtual GPU take what a recipe's `task` is simulated to take."""

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
PROGRAMS = Path(__file__).parent / "programs"
MODEL = str(MODELS / "llama.json")
PAIRS, TOKENS = 4, 128
LORA: dict[str, Any] = {"adapter": "lora", "gradient_checkpointing": True}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora checkpointing": LORA,
    "precomputed": {"dpo_reference": "precomputed"},
}


@pytest.mark.parametrize("kind", ["full", *(pytest.param(k, marks=pytest.mark.slow) for k in [*KINDS][1:])])
def test_dpo_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """But for what Trainer keeps besides: a mask of the padding and one of the answers in the place of
    labels, and three numbers: the losses together, the last loss, and the last norm of the gradients."""
    theirs = _peak_of(emulate, "tasks/dpo.py", kind)
    assert theirs - _simulated(task="dpo", **KINDS[kind]) == 2 * PAIRS * TOKENS * 8 + 3 * 512


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kto_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """But for the same of answers and of mismatched ones, and which of them are good."""
    theirs = _peak_of(emulate, "tasks/dpo.py", f"{kind} kto")
    assert theirs - _simulated(task="kto", **KINDS[kind]) == 2 * PAIRS * TOKENS * 8 + 4 * 512


@pytest.mark.parametrize("kind", ["full", pytest.param("lora checkpointing", marks=pytest.mark.slow)])
def test_orpo_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """But for a mask of the padding, Trainer's three numbers, and where embeddings are trained the ids of
    both answers, which TRL puts together and the embedding's backward keeps."""
    theirs = _peak_of(emulate, "tasks/answers.py", f"orpo {kind}")
    together = 2 * PAIRS * TOKENS * 8 if kind == "full" else 0
    ours = _simulated(task="orpo", **KINDS[kind])
    assert theirs - ours == 2 * PAIRS * TOKENS * 8 + 3 * 512 + together


@pytest.mark.parametrize("kind", ["full", pytest.param("lora checkpointing", marks=pytest.mark.slow)])
def test_grpo_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """But for a few tensors of a number a token: its batch has other ones, a mask in the place of labels."""
    theirs = _peak_of(emulate, "tasks/answers.py", f"grpo {kind}")
    assert abs(theirs - _simulated(task="grpo", **KINDS[kind])) < 2 * PAIRS * TOKENS * 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora checkpointing"])
def test_grpo_near_a_reference_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """It takes as much more than without one. But what the reference says of each token, a number of four
    bytes, Trainer forgets with its other inputs before backward."""
    theirs = [_peak_of(emulate, "tasks/answers.py", f"grpo {kind} {more}") for more in ("", "reference")]
    ours = [_simulated(task="grpo", grpo_beta=beta, **KINDS[kind]) for beta in (0.0, 0.04)]
    assert ours[1] - ours[0] - (theirs[1] - theirs[0]) == PAIRS * TOKENS * 4


@pytest.mark.parametrize("kind", ["full", pytest.param("lora checkpointing", marks=pytest.mark.slow)])
def test_fused_lm_head_takes_what_trl_takes(emulate: Emulate, kind: str) -> None:
    """But for a mask of the padding, Trainer's three numbers, and how many tokens have a label."""
    theirs = _peak_of(emulate, "tasks/dpo.py", f"{kind} sft")
    assert theirs - _simulated(loss="fused_lm_head", **KINDS[kind]) == PAIRS * TOKENS * 8 + 4 * 512


@pytest.mark.parametrize(
    ("kind", "fields"), [("", {}), pytest.param("lora checkpointing", LORA, marks=pytest.mark.slow)]
)
def test_reward_takes_what_trl_takes(emulate: Emulate, kind: str, fields: dict[str, Any]) -> None:
    """But for a mask of the padding, and Trainer's three numbers."""
    theirs = _peak_of(emulate, "tasks/scores.py", f"reward {kind}")
    assert theirs - _simulated(task="reward", **fields) == 2 * PAIRS * TOKENS * 8 + 3 * 512


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fields"), [("", {}), ("lora checkpointing", LORA)])
def test_classification_takes_what_transformers_takes(
    emulate: Emulate, kind: str, fields: dict[str, Any]
) -> None:
    """But for a mask of the padding, Trainer's three numbers, and how many labels there are."""
    theirs = _peak_of(emulate, "tasks/scores.py", f"classification {kind}")
    ours = _simulated(task="classification", num_labels=5, **fields)
    assert theirs - ours == PAIRS * TOKENS * 8 + 4 * 512


def _peak_of(emulate: Emulate, program: str, kind: str) -> int:
    printed = emulate(sys.executable, str(PROGRAMS / program), MODEL, *kind.split()).stdout
    return int(printed.rpartition("done: peak ")[2].split()[0])


def _simulated(**fields: Any) -> int:
    sizes: dict[str, Any] = {"micro_batch_size": PAIRS, "seq_len": TOKENS, "max_grad_norm": 1.0}
    profile, _ = simulate(Recipe(model=MODEL, **sizes, **fields), find_hardware("h100"))
    assert profile.memory.peak_allocated_bytes is not None
    return profile.memory.peak_allocated_bytes
