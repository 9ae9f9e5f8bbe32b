"""transformers.Trainer's own evaluate() and checkpoint on PyTorch's CUDA build take what is simulated."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.simulate.after_step import AfterStep
from harness.simulate.simulated_run import simulate
from harness.training.evaluation import Evaluation
from tests.support.places import ROOT
from tests.support.tiny import tiny

pytestmark = pytest.mark.virtual_gpu

PROGRAM = Path(__file__).parent / "programs" / "evaluation.py"
LORA = {"precision": "bf16", "adapter": "lora"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"precision": "bf16-mixed"}, {"accumulation_steps": 2, "batches": 5}),
    (LORA, {"keep_logits": False}),
]
SLOW: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"precision": "bf16"}, {}),
    ({"precision": "fp32"}, {}),
    (LORA, {"accumulation_steps": 1}),
    ({**LORA, "quantization": "nf4", "double_quant": True}, {}),
    ({"family": "mixtral"}, {}),
]


@pytest.mark.parametrize(
    ("fields", "settings"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_evaluation_and_checkpoint(
    emulate, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], settings: dict[str, Any]
) -> None:
    recipe = tiny(optimizer="adamw", seq_len=256, **fields)
    evaluation = Evaluation(**{"batches": 4, **settings})
    profile, _ = simulate(recipe, find_hardware("h100"), after=AfterStep(evaluation, checkpoint=True))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    asked = recipe.model_dump_json(), json.dumps(asdict(evaluation))
    theirs = json.loads(emulate(sys.executable, str(PROGRAM), *asked).stdout.splitlines()[-1])
    found = {name: profile.phases[name].peak_allocated_bytes for name in ("evaluation", "saving")}
    before = profile.phases["evaluation"].allocated_at_end_bytes
    assert {"before": before, **found} == theirs
