"""optimizer, optimizer_impl and optimizer_in_backward: the update, the state, and what is freed when."""

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from bitsandbytes import optim as bnb
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from harness.errors import InputError
from harness.recipe.fields import Optimizer
from harness.training.step import Training, train_step
from tests.support.long import long
from tests.support.tiny import ByteObserver, NullObserver, built, same_bits, step, tiny, train, weights
from tests.training.toggles.test_precision import PARAMETERS, TENSORS

LOW_RANK = {"galore_adamw": "galore_torch", "apollo_adamw": "apollo_torch"}
TORCHAO = ("adamw_torch_8bit", "adamw_torch_4bit")
OPTIMIZERS = [
    name
    for name in get_args(Optimizer)
    if name not in TORCHAO and (name not in LOW_RANK or find_spec(LOW_RANK[name]) is not None)
]
"""Those whose packages are here; without torchao's, which compile for seconds."""
ADAMW_8BIT = ("adamw_8bit", "paged_adamw_8bit")


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


Weights = dict[str, Tensor]
RATES: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.5}


def as_torch_s_documentation_says(weights: Weights) -> list[torch.optim.Optimizer]:
    """Muon on the matrices within the model, and AdamW for the rest."""
    outer = ("embed", "wte", "wpe", "lm_head")
    hidden = {n for n, w in weights.items() if w.ndim == 2 and not any(part in n for part in outer)}
    rest = [weight for name, weight in weights.items() if name not in hidden]
    muon = torch.optim.Muon([weights[n] for n in hidden], **RATES, adjust_lr_fn="match_rms_adamw")
    return [muon, *([torch.optim.AdamW(rest, **RATES)] if rest else [])]


def in_train_mode(weights: Weights) -> list[torch.optim.Optimizer]:
    """The gradient is taken at y."""
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(weights.values(), **RATES)
    optimizer.train()
    return [optimizer]


def by_torchao(bits: int) -> Callable[[Weights], list[torch.optim.Optimizer]]:
    return lambda weights: [
        getattr(pytest.importorskip("torchao.optim"), f"AdamW{bits}bit")(weights.values(), **RATES)
    ]


THEIRS: dict[str, Callable[[Weights], list[torch.optim.Optimizer]]] = {
    "adamw": lambda weights: [torch.optim.AdamW(weights.values(), **RATES)],
    "sgd": lambda weights: [torch.optim.SGD(weights.values(), **RATES)],
    "adafactor": lambda weights: [torch.optim.Adafactor(weights.values(), foreach=True, **RATES)],
    "adamw_8bit": lambda weights: [bnb.AdamW8bit(weights.values(), **RATES)],
    "paged_adamw_8bit": lambda weights: [bnb.PagedAdamW8bit(weights.values(), **RATES)],
    "paged_adamw": lambda weights: [bnb.PagedAdamW32bit(weights.values(), **RATES)],
    "lion_8bit": lambda weights: [bnb.Lion8bit(weights.values(), **RATES)],
    "muon": as_torch_s_documentation_says,
    "adamw_schedule_free": in_train_mode,
    "adamw_torch_8bit": by_torchao(8),
    "adamw_torch_4bit": by_torchao(4),
}
"""By name: the libraries' own optimizers of such weights. Those of low rank are Trainer's: `of_trainer`."""


def of_trainer(optimizer: str, model: Any, folder: Path) -> torch.optim.Optimizer:
    """The optimizer that Trainer makes of that name for the linear layers of the blocks."""
    pytest.importorskip(LOW_RANK[optimizer])
    arguments = TrainingArguments(
        output_dir=str(folder),
        optim=optimizer,
        optim_target_modules=["layers"],
        optim_args="rank=8",
        learning_rate=0.01,
        use_cpu=True,
        report_to=[],
    )
    theirs = Trainer(model, arguments).create_optimizer()
    for group in theirs.param_groups:
        group["weight_decay"] = 0.5
    return theirs


def test_every_optimizer_is_compared() -> None:
    assert {*THEIRS, *LOW_RANK} == set(get_args(Optimizer))


STEPPED: list[dict[str, Any]] = [
    *({"optimizer": name, **more} for name in THEIRS for more in ({}, {"precision": "bf16"})),
    *({"optimizer": "muon", **more} for more in ({"family": "gpt2"}, {"adapter": "lora"})),
    *({"optimizer": name, "optimizer_rank": 8} for name in LOW_RANK),
    *({"optimizer": name, "optimizer_rank": 8, "precision": "bf16"} for name in LOW_RANK),
    *({"optimizer": name, "family": "mixtral", "optimizer_rank": 8} for name in LOW_RANK),
    {"optimizer": "muon", "family": "mixtral"},
    {"optimizer": "adamw_schedule_free", "optimizer_impl": "for_loop"},
]


@pytest.mark.parametrize("fields", STEPPED, ids=lambda fields: " ".join(map(str, fields.values())))
def test_two_steps_are_those_of_the_library_s_own(fields: dict[str, Any], tmp_path: Path) -> None:
    recipe = tiny(learning_rate=0.01, weight_decay=0.5, **fields)
    kind, other = recipe.optimizer, built(recipe.model_copy(update={"optimizer": "sgd"}))[0].model
    twins = {name: weight for name, weight in other.named_parameters() if weight.requires_grad}
    theirs = [of_trainer(kind, other, tmp_path)] if kind in LOW_RANK else THEIRS[kind](twins)
    training = built(recipe)[0]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step for seconds
        for _ in range(2):
            for name, weight in training.model.named_parameters():
                if weight.requires_grad:
                    weight.grad = torch.randn_like(weight)
                    twins[name].grad = weight.grad.clone()
            for optimizer in (training.optimizer, *theirs):
                optimizer.step()
    after = weights(training, trained_only=True)
    assert after.keys() == twins.keys() != set()
    for name, weight in twins.items():
        torch.testing.assert_close(after[name], weight.detach(), rtol=1e-6, atol=1e-7, msg=name)


def test_sgd_keeps_nothing() -> None:
    training = train(tiny(optimizer="sgd"), 2).training
    assert [t for state in state_of(training) for t in state.values() if isinstance(t, Tensor)] == []


@pytest.mark.parametrize("optimizer", TORCHAO)
def test_torchao_s_state_is_as_many_bits_an_element(optimizer: str) -> None:
    """With an fp32 scale for each block, from 4,096 elements on."""
    pytest.importorskip("torchao.optim")
    bits, block = (8, 256) if optimizer == "adamw_torch_8bit" else (4, 128)
    with torch.compiler.set_stance("force_eager"):
        training = train(tiny(optimizer=optimizer), 1).training
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


def test_adafactor_keeps_a_row_and_a_column_for_a_matrix() -> None:
    """Shazeer 2018, section 3: rows + columns numbers for a matrix, and as many as elements for a vector."""
    training = train(tiny(optimizer="adafactor"), 1).training
    sizes = [sum(t.numel() for t in s.values() if isinstance(t, Tensor)) for s in state_of(training)]
    counter = 1
    expected = [(sum(p.shape) if p.dim() == 2 else p.numel()) + counter for p in training.model.parameters()]
    assert sizes == expected


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
