"""loss: fused_linear is the standard loss without all the logits, and refused where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from packaging.version import Version

from harness.errors import InputError, MissingDependency
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.simulate.simulated_run import simulate
from harness.training.model import build_model
from tests.support.napkin_oracle import keeps_workspaces, recipe_for
from tests.support.places import ROOT
from tests.support.tiny import CPU, tiny

# (fields, how far the losses and how far the gradients may be apart, relative)
SETTINGS: list[tuple[dict[str, Any], float, float]] = [
    ({"seq_len": 8}, 1e-6, 1e-5),
    ({"seq_len": 8, "gradient_accumulation_steps": 2}, 1e-6, 1e-5),
    ({"seq_len": 8, "adapter": "lora"}, 1e-6, 1e-5),
    ({"seq_len": 8, "family": "mixtral"}, 1e-6, 1e-5),
    (
        {"seq_len": 8, "precision": "fp16-mixed"},
        1e-4,
        4e-3,
    ),  # fp16 has 11 bits, and GradScaler's 65,536 is undone
    ({"seq_len": 8, "precision": "bf16"}, 1e-4, 0.03),  # 8 bits
    ({"seq_len": 8, "kernels": "liger"}, 1e-6, 1e-5),
    ({"seq_len": 8, "kernels": "liger", "adapter": "lora", "gradient_checkpointing": True}, 1e-6, 1e-5),
    ({"seq_len": 8, "kernels": "liger", "family": "gemma2", "attention": "eager"}, 1e-6, 1e-5),
    ({"seq_len": 8, "kernels": "liger", "loss": "fused_linear"}, 1e-6, 1e-5),
    ({"seq_len": 128, "micro_batch_size": 4}, 1e-6, 1e-5),
]


@pytest.fixture(scope="module")
def interpreted() -> list[dict[str, Any]]:
    """What both losses gave for each of SETTINGS, by Triton's interpreter."""
    reason = "Liger's kernels need Triton, which has no wheel for this platform"
    triton = pytest.importorskip("triton", reason=reason)
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("this Triton's interpreter makes numbers of arrays, which numpy refuses since 2.4")
    pytest.importorskip("liger_kernel")
    settings = json.dumps([fields for fields, _, _ in SETTINGS])
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.fused_linear_interpreted", settings],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(SETTINGS)), ids=[str(fields) for fields, _, _ in SETTINGS])
def test_liger_computes_what_the_standard_does(index: int, interpreted: list[dict[str, Any]]) -> None:
    _, loss_tolerance, gradient_tolerance = SETTINGS[index]
    result = interpreted[index]
    standard, fused = result["losses"]
    assert fused == pytest.approx(standard, rel=loss_tolerance)
    assert result["gradients"] > 10
    assert result["gradients_apart"] < gradient_tolerance


def test_fused_linear_never_holds_all_the_logits(interpreted: list[dict[str, Any]]) -> None:
    """Of 512 rows of 264 fp32 logits and as many of their softmax, at least one of the two is gone."""
    standard, fused = interpreted[-1]["forward_peak_bytes"]
    assert standard - fused > 512 * 264 * 4


def test_fused_linear_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(InputError, match=r"loss: fused_linear .* need a GPU; set loss: standard"):
        build_model(tiny(loss="fused_linear"), CPU)
    with pytest.raises(InputError, match=r"kernels: liger .* need a GPU; set kernels: standard"):
        build_model(tiny(kernels="liger"), CPU)


@pytest.mark.parametrize("family", ["gpt2", "pythia"])
def test_a_model_liger_does_not_know_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before the interpreter is asked for: a kernel stays what it was at its import, for every later test.
    pytest.importorskip("liger_kernel.ops")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(InputError, match=r"loss: fused_linear: Liger has no .* model; set loss: standard"):
        build_model(tiny(family, loss="fused_linear"), CPU)
    with pytest.raises(InputError, match=r"kernels: liger: Liger has no .* model; set kernels: standard"):
        build_model(tiny(family, kernels="liger"), CPU)


def test_without_liger_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", None)
    with pytest.raises(MissingDependency, match="pip install 'finetune-harness\\[liger\\]'"):
        build_model(tiny(loss="fused_linear"), CPU)


def test_a_simulation_is_the_same_where_triton_interprets() -> None:
    """No kernel runs on shape-only tensors: neither a compiled nor an interpreted one."""
    pytest.importorskip("liger_kernel.ops")
    command = [sys.executable, "-m", "harness", "simulate", "smoke", "loss=fused_linear", "--json"]
    profiles = [
        json.loads(subprocess.run(command, env=os.environ | extra, capture_output=True, check=True).stdout)
        for extra in ({"TRITON_INTERPRET": "0"}, {"TRITON_INTERPRET": "1"})
    ]
    assert profiles[0]["memory"] == profiles[1]["memory"]


@keeps_workspaces
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_a_simulation_adds_up_the_head_s_gradient_in_place_as_on_cuda(tmp_path: Path, precision: str) -> None:
    """Elsewhere Liger makes an fp32 copy of it for every chunk: here 12.8 MB beside 6.4 of bf16 products."""
    large_head = {"vocab_size": 50_000}
    recipe = recipe_for(tmp_path, "llama", config=large_head, loss="fused_linear", precision=precision)
    device = find_hardware("h100")
    estimate, (simulated, _) = predict(recipe, device), simulate(recipe, device)
    guess, found = estimate.phases["forward"], simulated.phases["forward"]
    assert found.peak_allocated_bytes is not None
    assert found.allocated_at_end_bytes is not None
    casts = 0 if precision == "bf16" else 2  # to 16 bit: of the head, which autocast keeps, and of its view
    head_bytes = 50_000 * 64 * 2
    assert found.peak_allocated_bytes - found.allocated_at_end_bytes < (casts + 0.5) * head_bytes
    # Liger makes the gradients in forward: two products more there than the textbook has
    tokens = recipe.micro_batch_size * recipe.seq_len
    gradients = 2 * 2 * tokens * 64 * 50_000
    assert found.flops == pytest.approx((guess.flops or 0) + gradients, rel=1e-5)
    assert found.bytes_moved is not None
    assert found.bytes_moved > 48 * 3 * head_bytes  # each chunk, here of one token, goes over the whole head
