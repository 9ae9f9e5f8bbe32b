"""Autocast on shape-only tensors does what torch's own does: same functions, same dtypes, same kept casts.

Two oracles: the lists in the header that torch is built from, and torch's autocast on real CPU tensors for
the functions that the CPU and CUDA treat alike.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from harness.simulate.cuda.autocast import FP32, FP32_RESULT, LOWER_PRECISION, PROMOTE, cuda_autocast_on_meta

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
BF16, FP = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _as_on_cuda() -> Iterator[None]:
    with cuda_autocast_on_meta():
        yield


def meta(*shape: int, dtype: torch.dtype = FP, requires_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def names_in_header(macro: str) -> set[str]:
    found = re.search(rf"#define {macro}\(_\)((?:[^\n]*\\\n)*[^\n]*)", HEADER.read_text())
    assert found
    return set(re.findall(r"_\((\w+)", found[1]))


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", LOWER_PRECISION),
        ("AT_FORALL_FP32", FP32 - {"norm"}),  # torch lists norm apart, for its other signature
        ("AT_FORALL_FP32_SET_OPT_DTYPE", FP32_RESULT),
        ("AT_FORALL_PROMOTE", PROMOTE),
    ],
)
def test_the_lists_are_torchs(macro: str, ours: frozenset[str]) -> None:
    assert ours == names_in_header(macro)


# (what it computes, the dtype that CUDA's autocast gives it for fp32 and for bf16 arguments)
RESULTS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, torch.dtype]] = {
    "linear": (lambda x: F.linear(x, x), BF16, BF16),
    "operator @": (lambda x: x @ x, BF16, BF16),
    "torch.mm": (lambda x: torch.mm(x, x), BF16, BF16),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x), BF16, BF16),
    "vecdot": (lambda x: torch.linalg.vecdot(x, x), BF16, BF16),
    "multi_dot": (lambda x: torch.linalg.multi_dot([x, x]), BF16, BF16),
    "softmax": (lambda x: F.softmax(x, -1), FP, FP),
    "softmax, of the tensor": (lambda x: x.softmax(-1), FP, FP),
    "softmax to bf16": (lambda x: F.softmax(x, -1, dtype=BF16), BF16, BF16),
    "sum": (lambda x: x.sum(), FP, FP),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x), FP, FP),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), FP, FP),
    "power": (lambda x: x**2, FP, FP),
    "exp": (lambda x: x.exp(), FP, FP),
    "norm": (lambda x: x.norm(), FP, FP),
    "no opinion: tanh": (lambda x: x.tanh(), FP, BF16),
    "no opinion: mean": (lambda x: x.mean(), FP, BF16),
    "no opinion: add": (lambda x: x + x, FP, BF16),
    "promote": (lambda x: torch.addcmul(x, x.to(FP), x.to(BF16)), FP, FP),
}


@pytest.mark.parametrize(("compute", "of_fp32", "of_bf16"), RESULTS.values(), ids=RESULTS.keys())
def test_dtypes_are_those_of_the_lists(
    compute: Callable[[Tensor], Tensor], of_fp32: torch.dtype, of_bf16: torch.dtype
) -> None:
    with torch.autocast("meta", dtype=BF16):
        assert compute(meta(4, 4)).dtype == of_fp32
        assert compute(meta(4, 4, dtype=BF16)).dtype == of_bf16
    assert compute(meta(4, 4)).dtype == (BF16 if compute is RESULTS["softmax to bf16"][0] else FP)


def test_integers_and_doubles_are_left_alone() -> None:
    with torch.autocast("meta", dtype=BF16):
        assert (meta(4, 4, dtype=torch.float64) @ meta(4, 4, dtype=torch.float64)).dtype == torch.float64
        assert meta(4, dtype=torch.int64).sum().dtype == torch.int64
        assert (meta(4, dtype=torch.int64) ** 2).dtype == torch.int64


def test_real_tensors_are_left_alone() -> None:
    with torch.autocast("meta", dtype=BF16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FP


class Casts(TorchDispatchMode):
    """Counts the copies that change the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


def casts_of(device: str, step: Callable[[str], None]) -> int:
    with Casts() as casts:
        step(device)
    return casts.count


def layers(device: str) -> nn.Module:
    first, last = nn.Linear(4, 4, device=device), nn.Linear(4, 4, bias=False, device=device)
    return nn.Sequential(first, nn.Tanh(), last)


def twice(device: str) -> None:
    """A weight is cast once however often it is used: 3 casts of parameters; and of the input, each time."""
    model, x = layers(device), torch.ones(2, 4, device=device)
    with torch.autocast(device, dtype=BF16):
        model(x)
        model(x)


def two_regions(device: str) -> None:
    """What was kept goes when the outermost region ends."""
    model, x = layers(device), torch.ones(2, 4, device=device)
    for _ in range(2):
        with torch.autocast(device, dtype=BF16):
            model(x)


def cleared(device: str) -> None:
    """What was kept can be let go within a region."""
    model, x = layers(device), torch.ones(2, 4, device=device)
    with torch.autocast(device, dtype=BF16):
        for _ in range(2):
            model(x)
            torch.clear_autocast_cache()


def frozen(device: str) -> None:
    """Only what is trained is kept: a frozen weight is cast each time."""
    model, x = layers(device).requires_grad_(False), torch.ones(2, 4, device=device)
    with torch.autocast(device, dtype=BF16):
        model(x)
        model(x)


def nested(device: str) -> None:
    """Inside a region that turns it off nothing is cast, and what was kept is still there afterwards."""
    model, x = layers(device), torch.ones(2, 4, device=device)
    with torch.autocast(device, dtype=BF16):
        model(x)
        with torch.autocast(device, enabled=False):
            model(x)
        model(x)


def trained(device: str) -> None:
    """Gradients flow back through the casts."""
    model, x = layers(device), torch.ones(2, 4, device=device)
    with torch.autocast(device, dtype=BF16):
        out = model(x)
    out.sum().backward()  # the sum, outside: CUDA's autocast has an opinion about it, the CPU's has none


def checkpointed(device: str) -> None:
    """The second forward, in backward, is under the same autocast."""
    model, x = layers(device), torch.ones(2, 4, device=device, requires_grad=True)
    with torch.autocast(device, dtype=BF16):
        out = checkpoint(model, x, use_reentrant=False)
    out.sum().backward()


@pytest.mark.parametrize("step", [twice, two_regions, cleared, frozen, nested, trained, checkpointed])
def test_as_many_casts_as_on_real_tensors(step: Callable[[str], None]) -> None:
    expected = casts_of("cpu", step)
    assert expected > 0
    assert casts_of("meta", step) == expected


def test_gradients_have_the_dtype_of_the_weight() -> None:
    model = nn.Linear(4, 4).to("meta")
    with torch.autocast("meta", dtype=torch.float16):
        loss = model(meta(2, 4)).float().sum()
    loss.backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == FP


def test_the_state_can_be_asked_for_and_comes_back() -> None:
    assert not torch.is_autocast_enabled("meta")
    with torch.autocast("meta", dtype=torch.float16):
        assert torch.is_autocast_enabled("meta")
        assert torch.is_autocast_enabled()  # without an argument it asks about CUDA
        assert torch.get_autocast_dtype("meta") == torch.float16
        with torch.autocast("meta", dtype=BF16, enabled=False):
            assert not torch.is_autocast_enabled("meta")
        assert torch.get_autocast_dtype("meta") == torch.float16
    assert not torch.is_autocast_enabled("meta")
    assert torch.amp.is_autocast_available("meta")


def test_a_region_can_be_entered_again_as_torchs_own() -> None:
    for device in ("cpu", "meta"):
        region = torch.autocast(device, dtype=BF16)
        for _ in range(2):
            with region:
                assert torch.is_autocast_enabled(device)
            assert not torch.is_autocast_enabled(device)


def test_a_failing_region_leaves_nothing_behind() -> None:
    with pytest.raises(RuntimeError), torch.autocast("meta", dtype=BF16):
        meta(2, 3) @ meta(4, 5)
    assert not torch.is_autocast_enabled("meta")
    assert (meta(2, 2) @ meta(2, 2)).dtype == FP
