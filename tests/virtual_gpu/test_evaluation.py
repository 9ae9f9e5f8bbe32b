"""transformers.Trainer's own evaluate() and checkpoint on PyTorch's CUDA build take what is simulated."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.recipe.file import recipe_yaml
from harness.simulate.simulated_run import simulate
from harness.step_profile.step_profile import StepProfile
from harness.training import AfterStep, Evaluation
from tests.support.commands import run_harness
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


def test_among_ranks_everyone_keeps_the_logits_of_all(emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny(optimizer="adamw", seq_len=256, precision="bf16", parallel="ddp", dp_replicate=2)
    evaluation = Evaluation(batches=4)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")  # no watchdog: its clock would decide what is kept
    profile, _ = simulate(recipe, find_hardware("h100"), after=AfterStep(evaluation, checkpoint=True))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    asked = recipe.model_dump_json(), json.dumps(asdict(evaluation))
    done = emulate(*torchrun, str(PROGRAM), *asked, options=("--gpus", "2"))
    found = {name: profile.phases[name].peak_allocated_bytes for name in ("evaluation", "saving")}
    before = profile.phases["evaluation"].allocated_at_end_bytes
    assert {"before": before, **found} == json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        (LORA, ("--eval-accumulation-steps", "2")),
        pytest.param({"precision": "bf16"}, (), marks=pytest.mark.slow),
        ({"precision": "bf16", "parallel": "fsdp", "dp_shard": 2}, ("--full-state-dict",)),
        pytest.param(
            {"precision": "bf16-mixed", "parallel": "fsdp", "dp_shard": 2}, (), marks=pytest.mark.slow
        ),
        pytest.param({**LORA, "parallel": "tp", "tp": 2}, ("--full-state-dict",), marks=pytest.mark.slow),
        pytest.param(
            {"precision": "bf16", "parallel": "fsdp", "dp_shard": 2, "cpu_offload": True},
            ("--full-state-dict",),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lora, accumulated", "whole", "fsdp, gathered", "fsdp, in parts", "tp", "fsdp, on the host"],
)
def test_a_run_with_them_is_the_simulation_of_it(
    fields: dict[str, Any], options: tuple[str, ...], tmp_path: Path
) -> None:
    """`harness run --gpu`: our own evaluation, by PyTorch's allocator, to the byte."""
    recipe = tiny(optimizer="adamw", seq_len=256, steps=1, warmup_steps=1, **fields)
    (tmp_path / "mine.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    asked = ["--phases", "train,eval,save", "--eval-batches", "5", *options, "--json"]
    found = []
    gpus = ["--gpus", "2"] if recipe.distributed else []
    for command in (["run", "mine.yaml", "--gpu", "h100", *gpus, "--out", "run"], ["simulate", "mine.yaml"]):
        printed = run_harness(*command, *asked, cwd=tmp_path).stdout
        found.append(StepProfile.from_json(printed, command[0]))
    emulated, simulated = found
    assert emulated.source == "emulated"
    for name in ("forward", "backward", "optimizer_step", "evaluation", "saving"):
        ours, theirs = emulated.phases[name], simulated.phases[name]
        assert ours.peak_allocated_bytes == theirs.peak_allocated_bytes, name
        assert ours.allocated_at_end_bytes == theirs.allocated_at_end_bytes, name
    assert emulated.evaluation is not None
    assert simulated.evaluation is not None
    assert emulated.evaluation.host_bytes is None  # nobody counts there
    assert emulated.evaluation.logits_bytes == simulated.evaluation.logits_bytes
    assert emulated.checkpoint is not None
    assert simulated.checkpoint is not None
    assert emulated.checkpoint.weights_bytes == simulated.checkpoint.weights_bytes
    assert emulated.checkpoint.optimizer_bytes == simulated.checkpoint.optimizer_bytes
