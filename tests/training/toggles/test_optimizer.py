"""optimizer, optimizer_impl and optimizer_in_backward: the update, the state, and what is freed when."""

import gc
import math
import weakref
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from harness.errors import InputError
from harness.recipe.fields import Optimizer
from harness.recipe.recipe import Recipe
from harness.training.step import Training, train_step
from tests.support.long import long
from tests.support.tiny import ByteObserver, NullObserver, built, same_bits, step, tiny, train, weights

PARAMETERS, TENSORS = (
    107_840,
    21,
)  # of tests/models/llama.json: counted by hand in training/toggles/test_precision.py
LOW_RANK = {"galore_adamw": "galore_torch", "apollo_adamw": "apollo_torch"}
TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
OPTIMIZERS = [
    name
    for name in get_args(Optimizer)
    if name not in TORCHAO and (name not in LOW_RANK or find_spec(LOW_RANK[name]) is not None)
]
"""Those whose packages are here; without torchao's, which compile for seconds."""
ADAMW_8BIT = ("adamw_8bit", "paged_adamw_8bit")


def moved(recipe: Recipe) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(weight before, gradient, weight after) of the first step, for every weight."""
    training, batches = built(recipe)
    before, gradients = weights(training), {}

    def look() -> None:
        gradients.update(
            {n: p.grad.clone() for n, p in training.model.named_parameters() if p.grad is not None}
        )

    step(training, batches, NullObserver(optimizer_step=look))
    after = weights(training)
    return [(before[name], gradients[name], after[name]) for name in before]


def state_of(training: Training) -> list[dict[str, Any]]:
    return [training.optimizer.state[p] for p in training.model.parameters()]


@pytest.mark.parametrize(
    "fields", [{}, pytest.param({"precision": "bf16"}, marks=long), {"adapter": "lora", "lora_alpha": 256.0}]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_learns_a_batch(optimizer: str, fields: dict[str, Any]) -> None:
    if optimizer in LOW_RANK and "adapter" in fields:
        pytest.skip("an adapter is of low rank already")
    # sgd: at ten times this rate the loss leaps, and where to depends on the processor's rounding
    rate = {"sgd": 2e-2, "lion_8bit": 1e-3, "adafactor": 3e-2}.get(optimizer, 3e-3)
    training, batches = built(tiny(optimizer=optimizer, learning_rate=rate, **fields))
    start = weights(training, trained_only=True)
    micro_batches, num_tokens = next(batches)
    losses = [train_step(training, micro_batches, num_tokens, NullObserver()).item() for _ in range(15)]
    assert losses[0] == pytest.approx(math.log(264), abs=0.2)
    assert losses[-1] < losses[0] - (0.15 if "adapter" in fields else 0.5)
    for name, weight in weights(training, trained_only=True).items():
        if weight.dim() == 2 or fields.get("precision") != "bf16":  # in bf16 a norm's 1.0 may not move at all
            assert not torch.equal(weight, start[name]), name


@pytest.mark.parametrize("optimizer", ["adamw", "paged_adamw", *ADAMW_8BIT])
def test_first_step_of_adamw(optimizer: str) -> None:
    """Loshchilov 2019, algorithm 2: both moments over their bias corrections are g and g^2, so the step is
    learning_rate * g / (|g| + eps), after a decay by learning_rate * weight_decay."""
    recipe = tiny(optimizer=optimizer, learning_rate=0.01, weight_decay=0.5)
    for before, gradient, after in moved(recipe):
        expected = before * (1 - 0.01 * 0.5) - 0.01 * gradient / (gradient.abs() + 1e-8)
        clear = gradient.abs() > 1e-6  # smaller ones drown in eps and in the order of rounding
        torch.testing.assert_close(after[clear], expected[clear], rtol=1e-5, atol=2e-5)


def test_first_step_of_lion_is_the_sign() -> None:
    """Chen 2023, algorithm 2: with a zero momentum, learning_rate * (sign(g) + weight_decay * w)."""
    for before, gradient, after in moved(tiny(optimizer="lion_8bit", learning_rate=0.01, weight_decay=0.5)):
        expected = before - 0.01 * (gradient.sign() + 0.5 * before)
        torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-6)


def test_sgd_moves_by_the_gradient_and_keeps_nothing() -> None:
    """torch's SGD adds weight_decay * w to the gradient; without momentum it has no state."""
    recipe = tiny(optimizer="sgd", learning_rate=0.1, weight_decay=0.5)
    for before, gradient, after in moved(recipe):
        torch.testing.assert_close(after, before - 0.1 * (gradient + 0.5 * before), rtol=1e-5, atol=1e-7)
    training = train(recipe, 2).training
    assert [t for state in state_of(training) for t in state.values() if isinstance(t, Tensor)] == []


def test_adafactor_keeps_a_row_and_a_column_for_a_matrix() -> None:
    """Shazeer 2018, section 3: rows + columns numbers for a matrix, and as many as elements for a vector."""
    training = train(tiny(optimizer="adafactor"), 1).training
    sizes = [sum(t.numel() for t in s.values() if isinstance(t, Tensor)) for s in state_of(training)]
    counter = 1
    expected = [(sum(p.shape) if p.dim() == 2 else p.numel()) + counter for p in training.model.parameters()]
    assert sizes == expected


@pytest.mark.parametrize("fields", [{}, {"family": "gpt2"}, {"adapter": "lora"}, {"family": "mixtral"}])
def test_muon_and_adamw_step_as_torch_s_own_do(fields: dict[str, Any]) -> None:
    """torch.optim.Muon on the linear layers within the model, as its documentation says; else AdamW."""
    recipe = tiny(optimizer="muon", learning_rate=0.01, weight_decay=0.5, **fields)
    training = built(recipe)[0]
    hidden = {
        name
        for name, weight in training.model.named_parameters()
        if weight.ndim == 2 and not any(part in name for part in ("embed", "wte", "wpe", "lm_head"))
    }
    expected: dict[str, Tensor] = {}
    for name, weight in training.model.named_parameters():
        if not weight.requires_grad:
            continue
        weight.grad = torch.randn_like(weight)
        expected[name] = weight.detach().clone()
        expected[name].grad = weight.grad.clone()
        if name in hidden:
            rule = {"adjust_lr_fn": "match_rms_adamw"}
            torch.optim.Muon([expected[name]], lr=0.01, weight_decay=0.5, **rule).step()
        else:
            torch.optim.AdamW([expected[name]], lr=0.01, weight_decay=0.5).step()
    training.optimizer.step()
    assert hidden & expected.keys()
    after = weights(training)
    for name, weight in expected.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-5, atol=1e-7)


def two_steps(training: Training, twins: dict[str, Any], theirs: torch.optim.Optimizer) -> None:
    """Of ours and of `theirs`, which steps the `twins` of our weights by the same gradients."""
    for _ in range(2):
        for name, weight in training.model.named_parameters():
            weight.grad = torch.randn_like(weight)
            twins[name].grad = weight.grad.clone()
        training.optimizer.step()
        theirs.step()


@pytest.mark.parametrize("impl", ["foreach", "for_loop"])
def test_schedule_free_steps_as_its_own_package_does(impl: str) -> None:
    """Two steps of the package's own, in train mode: the gradient is taken at y, and z is beside it."""
    recipe = tiny(optimizer="adamw_schedule_free", optimizer_impl=impl, learning_rate=0.01, weight_decay=0.5)
    training = built(recipe)[0]
    twins = {name: weight.detach().clone() for name, weight in training.model.named_parameters()}
    package = pytest.importorskip("schedulefree")
    theirs = package.AdamWScheduleFree(twins.values(), lr=0.01, weight_decay=0.5)
    theirs.train()
    two_steps(training, twins, theirs)
    after = weights(training)
    for name, weight in twins.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=1e-7)
    assert {key for state in state_of(training) for key in state} == {"z", "exp_avg_sq"}


@pytest.mark.parametrize("fields", [{}, {"family": "mixtral"}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("optimizer", LOW_RANK)
def test_projected_moments_step_as_transformers_trainer_has_them(
    optimizer: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Two steps of the optimizer that Trainer makes of the same name for the linear layers of the blocks."""
    pytest.importorskip(LOW_RANK[optimizer])
    recipe = tiny(optimizer=optimizer, optimizer_rank=8, learning_rate=0.01, weight_decay=0.5, **fields)
    training, other = built(recipe)[0], built(tiny(**fields))[0].model
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        optim=optimizer,
        optim_target_modules=["layers"],
        optim_args="rank=8",
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
    )
    theirs = Trainer(other, arguments).create_optimizer()
    for group in theirs.param_groups:
        group["weight_decay"] = 0.5
    twins = dict(other.named_parameters())
    two_steps(training, twins, theirs)
    after = weights(training)
    for name, weight in twins.items():
        torch.testing.assert_close(after[name], weight.detach(), rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", TORCHAO)
def test_torchao_steps_as_torchao_does(optimizer: str, precision: str) -> None:
    """And its state is as many bits an element, with an fp32 scale for each block, from 4,096 elements on."""
    torchao = pytest.importorskip("torchao.optim")
    bits, block = (8, 256) if optimizer == "adamw_torch_8bit" else (4, 128)
    training = built(tiny(optimizer=optimizer, precision=precision, learning_rate=0.01, weight_decay=0.5))[0]
    twins = {name: weight.detach().clone() for name, weight in training.model.named_parameters()}
    theirs = getattr(torchao, f"AdamW{bits}bit")(twins.values(), lr=0.01, weight_decay=0.5)
    with torch.compiler.set_stance("force_eager"):  # it compiles its step for seconds
        two_steps(training, twins, theirs)
    assert same_bits(weights(training), twins)
    quantized = 0
    for weight, state in zip(training.model.parameters(), state_of(training), strict=True):
        if hasattr(state["exp_avg"], "codes"):
            assert weight.numel() >= 4096
            assert state["exp_avg"].codes.numel() * 8 == weight.numel() * bits
            assert state["exp_avg"].scale.numel() * block == weight.numel()
            quantized += 1
        else:
            assert weight.numel() < 4096 or weight.numel() % block
    assert quantized


def test_a_model_without_linear_layers_has_nothing_to_project() -> None:
    pytest.importorskip("apollo_torch")
    with pytest.raises(InputError, match=r"no layer .* is a torch.nn.Linear.*Set optimizer: adamw"):
        built(tiny("gpt2", optimizer="apollo_adamw"))


@pytest.mark.parametrize("optimizer", [*ADAMW_8BIT, "lion_8bit"])
def test_8_bit_state(optimizer: str) -> None:
    """One byte an element and a 4-byte scale for 256 of them (Dettmers 2022), from 4,096 elements on."""
    training = train(tiny(optimizer=optimizer), 1).training
    kept = []
    for parameter, state in zip(training.model.parameters(), state_of(training), strict=True):
        moments = [state[name] for name in ("state1", "state2") if state.get(name) is not None]
        assert len(moments) == (1 if optimizer == "lion_8bit" else 2)
        large = parameter.numel() >= 4096
        assert {m.dtype for m in moments} == {torch.uint8 if large else torch.float32}
        assert all(m.numel() == parameter.numel() for m in moments)
        if large:
            assert state["absmax1"].numel() == math.ceil(parameter.numel() / 256)
            assert state["absmax1"].dtype == torch.float32
        kept.append(large)
    assert set(kept) == {True, False}


def test_paged_adamw_has_32_bit_state_and_follows_adamw() -> None:
    paged = train(tiny(optimizer="paged_adamw"), 10)
    assert {t.dtype for s in state_of(paged.training) for t in s.values() if isinstance(t, Tensor)} == {
        torch.float32
    }
    assert paged.losses == pytest.approx(train(tiny(), 10).losses, rel=1e-5)


def test_8_bit_adamw_stays_near_adamw() -> None:
    for optimizer in ADAMW_8BIT:
        assert train(tiny(optimizer=optimizer), 10).losses == pytest.approx(
            train(tiny(), 10).losses, rel=5e-3
        )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"precision": "bf16"},
        {"precision": "bf16", "master_weights": True},
        {"precision": "fp16-mixed", "max_grad_norm": 1.0},
        {"adapter": "lora", "weight_decay": 0.1},
        {"offload": ["optimizer"]},
        {"optimizer_in_backward": True},
        {"optimizer": "sgd", "learning_rate": 0.5},
    ],
)
def test_foreach_fused_and_for_loop_agree(fields: dict[str, Any]) -> None:
    runs = {impl: train(tiny(**fields, optimizer_impl=impl), 8) for impl in ("for_loop", "foreach", "fused")}
    tolerance = 2e-3 if fields.get("precision") == "bf16" else 1e-5  # one rounding of a bf16 weight apart
    for impl in ("foreach", "fused"):
        assert runs[impl].losses == pytest.approx(runs["for_loop"].losses, rel=tolerance), impl


def test_adafactor_foreach_and_for_loop_agree() -> None:
    for_loop = train(tiny(optimizer="adafactor", optimizer_impl="for_loop"), 8)
    foreach = train(tiny(optimizer="adafactor", optimizer_impl="foreach"), 8)
    assert foreach.losses == pytest.approx(for_loop.losses, rel=1e-5)


@pytest.mark.parametrize("optimizer_impl", ["for_loop", "foreach", "fused"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_implementation_is_the_one_asked_for(optimizer: str, optimizer_impl: str) -> None:
    """torch would choose by itself for None: on a GPU foreach, on a CPU a loop."""
    defaults = built(tiny(optimizer=optimizer, optimizer_impl=optimizer_impl))[0].optimizer.defaults
    asked = {"foreach": False, "fused": False} | (
        {optimizer_impl: True} if optimizer_impl != "for_loop" else {}
    )
    assert {name: defaults[name] for name in asked} == asked


IN_BACKWARD: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16-mixed"},
    {"gradient_checkpointing": True},
    {"weight_decay": 0.1, "optimizer_impl": "for_loop"},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "adafactor"},
    {"optimizer": "sgd", "learning_rate": 0.5},
    {"adapter": "lora"},
    {"adapter": "lora", "quantization": "nf4", "precision": "bf16"},
    {"offload": ["activations"]},
    {"family": "gpt2"},  # its head is its embedding: one weight with two uses, stepped once
    {"family": "gpt2", "gradient_checkpointing": True},
]


@pytest.mark.parametrize("fields", IN_BACKWARD)
def test_in_backward_is_the_ordinary_step(fields: dict[str, Any]) -> None:
    ordinary = train(tiny(**fields), 4)
    in_backward = train(tiny(**fields, optimizer_in_backward=True), 4)
    assert in_backward.losses == ordinary.losses
    assert same_bits(weights(in_backward.training), weights(ordinary.training))


def test_in_backward_frees_every_gradient() -> None:
    """Once backward is over the ordinary step holds all gradients, 4 bytes a parameter in fp32."""
    left: dict[bool, int] = {}
    peaks: dict[bool, int] = {}
    for in_backward in (False, True):
        observer = ByteObserver()
        training, batches = built(tiny(optimizer_in_backward=in_backward), observer)
        step(training, batches, observer)  # makes the state
        seen: list[list[Any]] = []

        def look(training: Training = training, seen: list[list[Any]] = seen) -> None:
            seen.append([p.grad for p in training.model.parameters() if p.grad is not None])

        observer.beginning["optimizer_step"] = look
        observer.peak_bytes.clear()
        step(training, batches, observer)
        assert len(seen[0]) == (0 if in_backward else TENSORS)
        left[in_backward] = observer.end_bytes["backward"]
        peaks[in_backward] = max(observer.peak_bytes.values())
    assert left[False] - left[True] == 4 * PARAMETERS
    assert peaks[True] < peaks[False]


@pytest.mark.parametrize(
    "fields",
    [{}, {"optimizer_in_backward": True}, {"offload": ["parameters"]}, {"offload": ["activations"]}],
    ids=str,
)
def test_a_training_that_is_over_leaves_no_weight_behind(fields: dict[str, Any]) -> None:
    """What autograd holds no garbage collector sees: a cycle through a hook would keep the whole model."""
    training, batches = built(tiny(**fields))
    step(training, batches)
    alive = [weakref.ref(parameter) for parameter in training.model.parameters()]
    del training, batches
    gc.collect()
    assert [reference() for reference in alive if reference() is not None] == []


class CopiesInto(TorchDispatchMode):
    """Notes what is copied into some tensors: the source's dtype, and whether the copy is only queued."""

    def __init__(self, targets: Iterable[Tensor]) -> None:
        super().__init__()
        self._targets = {tensor.data_ptr() for tensor in targets}
        self.seen: list[tuple[torch.dtype, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() in self._targets:
            self.seen.append((args[1].dtype, bool(args[2:] and args[2])))
        return func(*args, **(kwargs or {}))


def test_weights_stepped_on_the_host_cross_the_link_in_their_own_dtype():
    """A GPU would make room for the fp32 copy first. And nobody waits for the copies one by one."""
    recipe = tiny(offload=["optimizer"], precision="bf16", master_weights=True)
    training, batches = built(recipe)
    trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    with CopiesInto(trained) as copies:
        step(training, batches, NullObserver())
    assert copies.seen == [(torch.bfloat16, True)] * TENSORS


def test_the_copy_lets_go_of_its_gradients():
    training, batches = built(tiny(precision="bf16", master_weights=True))
    step(training, batches, NullObserver())
    copies = [copy for group in training.optimizer.param_groups for copy in group["params"]]
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    training.optimizer.zero_grad()
    assert [copy.grad for copy in copies] == [None] * TENSORS


def test_adamw_with_moments_in_fp16_divides_by_no_zero():
    """1e-8, the usual eps, is 0 in fp16: a weight whose gradient's square is 0 would become 0 / 0."""
    trained = train(tiny(precision="fp16"), 3)
    (group,) = trained.training.optimizer.param_groups
    assert float(torch.tensor(group["eps"], dtype=torch.float16)) > 0
    assert all(weight.dtype == torch.float16 for weight in weights(trained.training).values())
    assert all(torch.isfinite(weight).all() for weight in weights(trained.training).values())
