"""A model that is made later, in parts and out of order, has the values of one that is built at once."""

import inspect
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.parallel import Deferred
from harness.training.model import build_model
from harness.training.toggles.quantization import quantize_linear
from tests.support.tiny import CPU, tiny


class Model(nn.Module):
    """All the ways in which a weight or a buffer comes to its values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 10, bias=False)
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("root", torch.tensor(8**0.5))
        self.register_buffer("frequencies", 1.0 / (100.0 ** (torch.arange(0, 8, 2).float() / 8)))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=0.02)  # type: ignore[arg-type]
        nn.init.xavier_normal_(self.head.weight)
        self.head.weight = self.embedding.weight
        self.blocks[0].weight.data = self.blocks[0].weight.data.to(torch.float64)  # type: ignore[union-attr]


def values(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_made_in_parts_and_out_of_order_it_has_the_same_values(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    deferred = Deferred(CPU)
    try:
        expected, next_number = values(Model()), torch.rand(())
        torch.manual_seed(0)
        with deferred.recording() as shapes, shapes:
            model = Model()
    finally:
        torch.set_default_dtype(torch.float32)  # as it is when a rank makes its units
    assert deferred.knows(model)
    assert all(tensor.is_meta for tensor in values(model).values())
    assert torch.equal(torch.rand((), dtype=dtype), next_number)
    make = deferred.maker(model)
    before = torch.get_rng_state()
    make([model.blocks[2], model.head])
    assert [p.is_meta for p in (model.blocks[2].weight, model.blocks[1].weight)] == [False, True]
    assert model.head.weight is model.embedding.weight
    make([model])
    assert torch.equal(torch.get_rng_state(), before)
    assert model.head.weight is model.embedding.weight
    for name, tensor in values(model).items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


class _Ends(TorchDispatchMode):
    """Notes by number which tensors that operators made have ended, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.ended = 0, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        weakref.finalize(out, self.ended.append, self.made)
        self.made += 1
        return out


def test_what_is_needed_no_more_ends_in_the_order_in_which_it_was_made() -> None:
    """It is a device's memory: its order must not be that of a set, which follows addresses on the host."""
    count = 64
    deferred = Deferred(CPU)
    with deferred.recording() as shapes, shapes:
        model = nn.Module()
        model.register_buffer("whole", torch.cat([torch.ones(3) for _ in range(count)]))
    with _Ends() as ends:
        deferred.maker(model)([model])
    assert ends.ended == list(range(count))


def test_what_was_made_elsewhere_it_does_not_know() -> None:
    elsewhere = torch.ones(3, device="meta")
    deferred = Deferred(CPU)
    with deferred.recording() as shapes, shapes:
        model = nn.Linear(3, 3)
        model.register_buffer("doubled", 2 * elsewhere)
    assert not deferred.knows(model)


def test_draws_that_look_at_their_numbers_it_does_not_know() -> None:
    deferred = Deferred(CPU)
    with deferred.recording() as shapes, shapes:
        model = nn.Linear(3, 3)
        nn.init.trunc_normal_(model.weight)
    looks = ".any()" in inspect.getsource(nn.init._no_grad_trunc_normal_)  # torch 2.11 computes them
    assert deferred.knows(model) == (not looks)


NF4: dict[str, Any] = {"adapter": "lora", "quantization": "nf4", "parallel": "fsdp", "dp_shard": 2}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"adapter": "lora"},
    "nf4": NF4,
    "nf4 twice, mixed": NF4 | {"double_quant": True, "precision": "bf16-mixed"},
    "nf4 prepared": NF4 | {"upcast_for_kbit": True, "precision": "bf16"},
}


@pytest.mark.parametrize("weights", ["random", "pretrained"])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_a_model_made_layer_by_layer_is_the_one_built_at_once(
    fields: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    build_model(tiny(), CPU).save_pretrained(tmp_path)
    recipe = tiny(**fields, weights=weights, **({"model": str(tmp_path)} if weights == "pretrained" else {}))
    expected = build_model(recipe, CPU)
    deferred = Deferred(CPU, quantize_linear)
    model = build_model(recipe, CPU, deferred)
    assert deferred.knows(model)
    assert all(tensor.is_meta for tensor in values_with_scales(model).values())
    deferred.maker(model)([model])
    ours, theirs = values_with_scales(model), values_with_scales(expected)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.requires_grad == theirs[name].requires_grad, name
        assert torch.equal(bytes_of(tensor), bytes_of(theirs[name])), name


def values_with_scales(model: nn.Module) -> dict[str, Tensor]:
    found = dict([*model.named_parameters(), *model.named_buffers()])
    for name, module in model.named_modules():
        state = getattr(getattr(module, "weight", None), "quant_state", None)
        found |= {} if state is None else {f"{name}.absmax": state.absmax, f"{name}.code": state.code}
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    """Packed values are no numbers of their dtype."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
