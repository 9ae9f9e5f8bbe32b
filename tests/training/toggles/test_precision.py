"""precision, master_weights, fp8: dtypes of tensors, the fp32 copy to the byte, loss scaling, fp8."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from harness.errors import InputError
from harness.observe.labels import labelled_tensors
from harness.training.step import Training, train_step
from tests.support.tiny import ByteObserver, NullObserver, built, same_bits, step, tiny, train, weights

PARAMETERS = 107_840
"""Of tests/models/llama.json, by hand: embedding and head 2 * 264 * 64 = 33,792; a block: q and o
2 * 64 * 64, k and v 2 * 32 * 64, MLP 3 * 64 * 128, norms 2 * 64 = 36,992; two blocks and the last
norm 74,048."""
TENSORS = 2 + 2 * 9 + 1
"""Embedding and head; in a block 4 attention, 3 MLP and 2 norm weights; the last norm."""

fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16


class Dtypes(NamedTuple):
    weights: torch.dtype
    product: torch.dtype
    gradients: torch.dtype
    state: torch.dtype


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"precision": "fp32"}, Dtypes(fp32, fp32, fp32, fp32)),
        ({"precision": "bf16"}, Dtypes(bf16, bf16, bf16, bf16)),
        ({"precision": "fp16"}, Dtypes(fp16, fp16, fp16, fp16)),
        ({"precision": "bf16-mixed"}, Dtypes(fp32, bf16, fp32, fp32)),
        ({"precision": "fp16-mixed"}, Dtypes(fp32, fp16, fp32, fp32)),
        ({"precision": "bf16", "master_weights": True}, Dtypes(bf16, bf16, bf16, fp32)),
        ({"precision": "fp16", "master_weights": True}, Dtypes(fp16, fp16, fp16, fp32)),
    ],
)
def test_dtypes(fields: dict[str, Any], expected: Dtypes) -> None:
    training, batches = built(tiny(**fields))
    products: set[torch.dtype] = set()
    for module in training.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, output: products.add(output.dtype))
    gradients: set[torch.dtype] = set()

    def look() -> None:
        gradients.update(p.grad.dtype for p in training.model.parameters() if p.grad is not None)

    step(training, batches, NullObserver(optimizer_step=look))
    assert {p.dtype for p in training.model.parameters()} == {expected.weights}
    assert products == {expected.product}
    assert gradients == {expected.gradients}
    state = {t.dtype for t in state_tensors(training) if t.dim() > 0}
    assert state == {expected.state}
    assert all(
        p.dtype == expected.state for group in training.optimizer.param_groups for p in group["params"]
    )


def test_under_autocast_the_frozen_base_stays_as_its_config_declares_it() -> None:
    model = built(tiny(precision="bf16-mixed", adapter="lora"))[0].model
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {bf16}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {fp32}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_master_weights_take_16_bytes_a_parameter(precision: str) -> None:
    """2 (weight) + 2 (gradient) + 4 (copy) + 4 + 4 (both moments), on the tensors of the second step."""
    training, batches = built(tiny(precision=precision, master_weights=True))
    step(training, batches)
    moments = [t for t in state_tensors(training) if t.dim() > 0]
    assert len(moments) == 2 * TENSORS
    seen: dict[str, int] = {}

    def look() -> None:
        seen["weights"] = sum(p.nbytes for p in training.model.parameters())
        seen["gradients"] = sum(p.grad.nbytes for p in training.model.parameters() if p.grad is not None)
        copies = [p for group in training.optimizer.param_groups for p in group["params"]]
        seen["copies"] = sum(p.nbytes for p in copies)
        seen["moments"] = sum(t.nbytes for t in moments)
        seen["copied gradients"] = sum(p.grad.nbytes for p in copies if p.grad is not None)

    step(training, batches, NullObserver(optimizer_step=look))
    per_parameter = {name: size / PARAMETERS for name, size in seen.items()}
    assert per_parameter == {"weights": 2, "gradients": 2, "copies": 4, "moments": 8, "copied gradients": 0}


def test_master_weights_are_all_that_is_allocated() -> None:
    """The same from the tracker's side: it sees each byte that is born, whoever holds it."""
    observer = ByteObserver()
    training, batches = built(tiny(precision="bf16", master_weights=True), observer)
    inv_freq_bytes = 2 * 8 * 4  # the rotary embedding's buffer and its original: 16-wide heads, fp32
    assert observer.allocated_bytes == (2 + 4) * PARAMETERS + inv_freq_bytes
    step(training, batches, observer)
    counters_bytes = 4 * TENSORS  # AdamW counts the steps of each tensor in an fp32 scalar
    expected = (2 + 4 + 8) * PARAMETERS + counters_bytes + inv_freq_bytes
    assert observer.allocated_bytes == expected
    labelled = {t.untyped_storage()._cdata: t.nbytes for _, t in labelled_tensors(training)}
    assert sum(labelled.values()) == expected


def test_master_weights_follow_fp32_more_closely_than_bf16_alone() -> None:
    """50 steps from the same weights. Without a copy, an update too small for the last bit is lost."""
    fields = {"learning_rate": 3e-4}
    start = weights(built(tiny(precision="bf16"))[0])
    exact = train(tiny(**fields), 50, start={name: weight.float() for name, weight in start.items()})
    alone = train(tiny(**fields, precision="bf16"), 50)
    master = train(tiny(**fields, precision="bf16", master_weights=True), 50)

    def distance(losses: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(losses, exact.losses, strict=True))

    assert distance(master.losses) < distance(alone.losses)

    def apart(training: Training) -> float:
        ours, theirs = weights(training), weights(exact.training)
        return math.sqrt(sum((ours[n].float() - theirs[n]).square().sum().item() for n in theirs))

    assert apart(master.training) < apart(alone.training) / 2


@pytest.mark.parametrize("fields", [{}, {"master_weights": True}, {"max_grad_norm": 1.0}])
def test_fp16_weights_train_with_finite_losses(fields: dict[str, Any]) -> None:
    training, batches = built(tiny(precision="fp16", **fields))
    micro_batches, num_tokens = next(batches)
    losses = [train_step(training, micro_batches, num_tokens, NullObserver()).item() for _ in range(12)]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.5
    assert all(p.isfinite().all() for p in training.model.parameters())


SCALED: list[dict[str, Any]] = [
    {"precision": "fp16"},
    {"precision": "fp16", "master_weights": True},
    {"precision": "fp16", "master_weights": True, "offload": ["optimizer"]},
    {"precision": "fp16-mixed"},
    {"precision": "fp16-mixed", "optimizer_impl": "fused"},
    {"precision": "fp16-mixed", "optimizer": "adamw_8bit"},
    {"precision": "fp16-mixed", "adapter": "lora"},
    {"precision": "fp16-mixed", "max_grad_norm": 1.0},
]


@pytest.mark.parametrize("fields", SCALED)
def test_an_infinite_gradient_skips_the_step_and_halves_the_scale(fields: dict[str, Any]) -> None:
    training, batches = built(tiny(**fields))
    assert training.scaler is not None
    step(training, batches)
    before, state = weights(training), [t.clone() for t in state_tensors(training)]
    scale = training.scaler.get_scale()
    victim = next(p for p in training.model.parameters() if p.requires_grad)
    poison = victim.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), math.inf))
    loss = step(training, batches)
    assert loss.isfinite()
    assert same_bits(weights(training), before)
    assert all(map(torch.equal, state_tensors(training), state))
    assert training.scaler.get_scale() == scale / 2
    poison.remove()
    step(training, batches)
    assert not same_bits(weights(training), before)
    assert training.scaler.get_scale() == scale / 2


PLAIN: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16-mixed"},
    {"precision": "fp16-mixed"},
    {"gradient_accumulation_steps": 2, "max_grad_norm": 0.25},
    {"precision": "fp16-mixed", "max_grad_norm": 0.25, "optimizer_impl": "fused"},
    {"precision": "fp16-mixed", "max_grad_norm": 1000.0, "gradient_accumulation_steps": 2},
    {"precision": "fp16-mixed", "adapter": "lora", "max_grad_norm": 0.25},
]


@pytest.mark.parametrize("fields", PLAIN, ids=str)
def test_steps_are_those_that_pytorch_documents(fields: dict[str, Any]) -> None:
    """The loop of its "Automatic Mixed Precision examples", which unscales gradients before it clips them.
    The same rows give the same losses, scales and weights to the bit; the scale doubles in three steps."""
    recipe = tiny(**fields)
    (ours, our_batches), (theirs, their_batches) = built(recipe), built(recipe)
    half, mixed = recipe.precision == "fp16-mixed", recipe.precision.endswith("-mixed")
    kind = {"foreach": recipe.optimizer_impl == "foreach", "fused": recipe.optimizer_impl == "fused"}
    trained = [weight for weight in theirs.model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, **kind)
    scaler = torch.amp.GradScaler("cpu", enabled=half, growth_interval=3)
    assert (ours.scaler is not None) == half
    if ours.scaler is not None:
        assert ours.scaler.get_growth_interval() == 2000  # torch's default
        ours.scaler.set_growth_interval(3)
    for _ in range(7):
        expected = torch.zeros(())
        micro_batches, num_tokens = next(their_batches)
        for batch in micro_batches:
            with torch.autocast("cpu", fp16 if half else bf16, enabled=mixed):
                loss = theirs.model(**batch, num_items_in_batch=num_tokens).loss
            scaler.scale(loss).backward()
            expected = expected + loss.detach()
        scaler.unscale_(optimizer)
        if recipe.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert step(ours, our_batches).item() == pytest.approx(expected.item(), rel=1e-6)
        if ours.scaler is not None:
            assert ours.scaler.get_scale() == scaler.get_scale()
    assert same_bits(weights(ours), weights(theirs))


def state_tensors(training: Training) -> list[Tensor]:
    return [t for state in training.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]


# --- products in fp8 -----------------------------------------------------------------------------------


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """By hand: scaled so that the largest value is the largest of `dtype`, rounded, and scaled back."""
    most = torch.finfo(dtype).max
    scale = most / values.float().abs().max()
    return (values.float() * scale).clamp(-most, most).to(dtype).float() / scale


def test_linear_layers_but_the_head_multiply_in_fp8_and_keep_their_weights() -> None:
    pytest.importorskip("torchao.float8")
    model = built(tiny(precision="bf16", fp8=True))[0].model
    kinds = {
        name: type(layer).__name__ for name, layer in model.named_modules() if hasattr(layer, "in_features")
    }
    assert kinds.pop("lm_head") == "Linear"
    assert len(kinds) == 2 * 7
    assert set(kinds.values()) == {"Float8Linear"}
    assert {weight.dtype for weight in model.parameters()} == {bf16}


def test_a_product_in_fp8_is_that_of_rounded_factors_and_so_are_its_gradients() -> None:
    """One scale a factor: input and weight in e4m3, the gradient of the output in e5m2 (arXiv 2209.05433)."""
    pytest.importorskip("torchao.float8")
    layer = built(tiny(precision="bf16", fp8=True))[0].model.model.layers[0].mlp.gate_proj
    weight = layer.weight.detach()
    values = torch.randn(2, 16, 64, dtype=bf16).requires_grad_()
    above = torch.randn(2, 16, 128, dtype=bf16)
    out = layer(values)
    out.backward(above)
    x, w, g = rounded(values.detach(), E4M3), rounded(weight, E4M3), rounded(above, E5M2)
    close = {"rtol": 2e-2, "atol": 2e-2}  # bf16 has 8 bits
    torch.testing.assert_close(out.detach().float(), x @ w.T, **close)
    assert values.grad is not None
    torch.testing.assert_close(values.grad.float(), g @ w, **close)
    torch.testing.assert_close(layer.weight.grad.float(), g.flatten(0, 1).T @ x.flatten(0, 1), **close)
    assert not torch.allclose(
        out.detach().float(), values.detach().float() @ weight.float().T, rtol=1e-3, atol=1e-3
    )


def test_a_model_without_linear_layers_has_nothing_to_multiply_in_fp8() -> None:
    pytest.importorskip("torchao.float8")
    with pytest.raises(InputError, match=r"fp8: true: .* has no torch.nn.Linear .*; set fp8: false"):
        built(tiny("gpt2", precision="bf16", fp8=True))
