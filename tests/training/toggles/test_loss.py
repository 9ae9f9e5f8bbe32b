"""The losses without all the logits are the standard one, and refused where they cannot run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from packaging.version import Version
from torch import Tensor

from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.simulate.simulated_run import simulate
from harness.training.model import build_model
from harness.training.step import Training
from tests.support.napkin_oracle import recipe_for
from tests.support.places import ROOT
from tests.support.releases import keeps_workspaces
from tests.support.tiny import CPU, ByteObserver, built, step, tiny, train
from tests.training.toggles.test_preference import tokenizer

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


def test_a_simulation_is_the_same_where_triton_interprets() -> None:
    """No kernel runs on shape-only tensors: neither a compiled nor an interpreted one."""
    pytest.importorskip("liger_kernel.ops")
    command = [sys.executable, "-m", "harness", "simulate", "smoke", "loss=fused_linear", "--json"]
    profiles = [
        json.loads(subprocess.run(command, env=os.environ | extra, capture_output=True, check=True).stdout)
        for extra in ({"TRITON_INTERPRET": "0"}, {"TRITON_INTERPRET": "1"})
    ]
    assert profiles[0]["memory"] == profiles[1]["memory"]


def loss_and_gradients(training: Training, batches: Iterator[Any]) -> tuple[Tensor, dict[str, Tensor]]:
    ((batch,), num_tokens) = next(batches)
    loss = training.loss(training.model, batch, num_tokens)
    loss.backward()
    named = training.model.named_parameters()
    return loss.detach(), {name: weight.grad for name, weight in named if weight.grad is not None}


@pytest.mark.parametrize(
    "fields", [{}, {"adapter": "lora"}, {"family": "mixtral"}, {"family": "gpt2"}], ids=str
)
@pytest.mark.parametrize("loss", ["linear_cross_entropy", "fused_lm_head"])
def test_a_loss_in_chunks_is_the_model_s_own(loss: str, fields: dict[str, Any]) -> None:
    require(loss)
    theirs, expected = loss_and_gradients(*built(tiny(**fields)))
    ours, found = loss_and_gradients(*built(tiny(loss=loss, **fields)))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert found.keys() == expected.keys() != set()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def require(loss: str) -> None:
    if loss == "fused_lm_head":
        pytest.importorskip("trl")
    elif not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        pytest.skip("this PyTorch has no linear_cross_entropy")


@pytest.mark.parametrize("loss", ["linear_cross_entropy", "fused_lm_head"])
def test_micro_batches_share_the_tokens_of_the_step(loss: str) -> None:
    require(loss)
    whole = train(tiny(loss=loss, micro_batch_size=4), 2)
    parts = train(tiny(loss=loss, micro_batch_size=1, gradient_accumulation_steps=4), 2)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize(
    "fields", [{}, {"adapter": "lora"}, {"family": "gemma2", "attention": "eager"}], ids=str
)
def test_fused_lm_head_is_sfttrainer_s(fields: dict[str, Any], tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    training, batches = built(tiny(loss="fused_lm_head", **fields))
    ours, gradients = loss_and_gradients(training, batches)
    ((batch,), num_tokens) = next(built(tiny(**fields))[1])
    other = built(tiny(**fields))[0].model
    arguments = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    trainer = trl.SFTTrainer(
        other,
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"text": "a"}] * 8),
        processing_class=tokenizer(),
    )
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    loss = trainer.compute_loss(other, batch, num_items_in_batch=torch.tensor(num_tokens))
    loss.backward()
    assert torch.equal(ours, loss.detach())
    for name, weight in other.named_parameters():
        assert (weight.grad is None) == (name not in gradients)
        if weight.grad is not None:
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-6, atol=1e-9, msg=name)


def test_linear_cross_entropy_never_holds_all_the_logits() -> None:
    """Of 512 rows of 264 fp32 logits there are those of a chunk: a quarter of the rows, and half of that."""
    require("linear_cross_entropy")
    peaks: dict[str, int] = {}
    for loss in ("standard", "linear_cross_entropy"):
        observer = ByteObserver()
        recipe = tiny(loss=loss, seq_len=128, micro_batch_size=4)
        training, batches = built(recipe, observer)
        step(training, batches, observer)
        peaks[loss] = observer.peak_bytes["forward"]
    assert peaks["standard"] - peaks["linear_cross_entropy"] > 512 * 264 * 4


def test_what_linear_cross_entropy_cannot_be_is_refused() -> None:
    require("linear_cross_entropy")
    with pytest.raises(InputError, match=r"the loss of gemma2 is more than .*; set loss: standard"):
        build_model(tiny("gemma2", attention="eager", loss="linear_cross_entropy"), CPU)


def test_where_pytorch_does_not_have_it_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    with pytest.raises(InputError, match=r"PyTorch \S+ does not have it; set loss: standard"):
        build_model(tiny(loss="linear_cross_entropy"), CPU)


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
    # Liger makes the gradients in forward: two products more there
    tokens = recipe.micro_batch_size * recipe.seq_len
    standard = predict(recipe.model_copy(update={"loss": "standard"}), device).phases["forward"]
    gradients = 2 * 2 * tokens * 64 * 50_000
    assert found.flops == pytest.approx((standard.flops or 0) + gradients, rel=1e-5)
    assert guess.flops == pytest.approx(found.flops, rel=1e-5)
    assert found.bytes_moved is not None
    assert found.bytes_moved > 48 * 3 * head_bytes  # each chunk, here of one token, goes over the whole head
