"""Where Python's side takes another way on CUDA: the operators that run then, on shape-only tensors.

What every step runs is held by tests/simulate/test_recorded_traces.py: softmax in one kernel, clipping by
lists, the cache that peft empties.
"""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import moe

from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.kernels import Gpu
from harness.simulate.cuda.behaviour import CudaRules, cuda_behaviour
from harness.simulate.cuda.device_is_cuda import as_on_cuda
from harness.simulate.cuda.libraries import library_replacements
from harness.simulate.device import SimulatedDevice
from harness.simulate.simulated_run import simulate
from harness.system import Replacement, TorchRelease, all_replaced, replaced
from tests.support.tiny import tiny

MIB = 1 << 20


class Operators(TorchDispatchMode):
    """Names of the operators that run inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def as_on(gpu: str, **fields: Any) -> Any:
    return cuda_behaviour(CudaRules(tiny(**fields), find_hardware(gpu)))


def test_softmax_of_real_fp16_is_torchs_own() -> None:
    scores = torch.rand(4, 8).half()
    with as_on("h100"):
        assert torch.equal(F.softmax(scores, -1, dtype=torch.float32), scores.float().softmax(-1))


@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_one_operator(weighted: bool) -> None:
    x = meta(4, 6, 8, dtype=torch.bfloat16).requires_grad_()
    weight = nn.Parameter(meta(8, dtype=torch.bfloat16)) if weighted else None
    with as_on("h100"):
        with Operators() as forward:
            out = F.rms_norm(x, (8,), weight, 1e-6)
        with Operators() as backward:
            out.backward(torch.empty_like(out))
    assert [name for name in forward.names if name != "detach.default"] == ["_fused_rms_norm.default"]
    assert "_fused_rms_norm_backward.default" in backward.names
    assert out.shape == x.shape
    with Operators() as elsewhere:  # nothing is left behind
        F.rms_norm(x, (8,), weight, 1e-6)
    assert "_fused_rms_norm.default" not in elsewhere.names


LINEAR = {
    "contiguous": lambda device: torch.ones(2, 3, 8, device=device),
    "transposed": lambda device: torch.ones(2, 8, 3, device=device).transpose(1, 2),
    "a part of its tokens": lambda device: torch.ones(2, 5, 8, device=device)[:, :3],
    "a matrix": lambda device: torch.ones(8, 3, device=device).t(),
}
"""Inputs of a linear layer."""


@pytest.mark.parametrize("make", LINEAR.values(), ids=LINEAR.keys())
def test_a_linear_layer_runs_the_operators_that_it_runs_without_a_mode(make: Callable[[str], Tensor]) -> None:
    """Which PyTorch's profiler tells on the CPU. In a mode PyTorch itself would add the bias out of place."""
    named = {"aten::addmm", "aten::mm", "aten::bmm", "aten::add", "aten::add_"}
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        F.linear(make("cpu"), torch.ones(4, 8), torch.ones(4))
    expected = [event.name.removeprefix("aten::") for event in recorded.events() if event.name in named]
    with as_on("h100"), Operators() as seen:
        F.linear(make("meta"), meta(4, 8), meta(4))
    ours = [name.partition(".")[0] for name in seen.names]
    assert [name for name in ours if f"aten::{name}" in named] == expected


def test_one_hot_writes_ones_into_zeros() -> None:
    with as_on("h100"), Operators() as seen:
        out = F.one_hot(meta(5, 2, dtype=torch.int64), num_classes=4)
        assert F.one_hot(torch.tensor([1]), 2).tolist() == [[0, 1]]
    assert (out.shape, out.dtype) == ((5, 2, 4), torch.int64)
    assert "scatter_.value" in seen.names
    assert not {"arange.default", "eq.Tensor", "_to_copy.default"} & set(seen.names)


def test_autocast_casts_the_bias_that_is_added() -> None:
    x = meta(2, 8, 3).transpose(1, 2)
    with as_on("h100"), torch.autocast("meta", torch.bfloat16), Operators() as seen:
        out = F.linear(x, meta(4, 8), meta(4))
    assert out.dtype == torch.bfloat16
    assert seen.names.count("_to_copy.default") == 3
    assert "add_.Tensor" in seen.names


def test_a_weight_of_the_host_gets_data_of_the_device() -> None:
    weight = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    with as_on("h100", adapter="lora", peft={"init_lora_weights": "pissa"}):
        weight.data = meta(3, 2)
        assert weight.is_meta
        assert weight.data.shape == (3, 2)
        assert not weight.requires_grad
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # torch's own, which is back
        nn.Parameter(torch.ones(1)).data = meta(1)


def test_a_disguised_function_forks_the_random_state_of_the_gpu() -> None:
    """As peft does for the first values of PSOFT."""

    def draws() -> Tensor:
        with torch.random.fork_rng(devices=[0]):
            return torch.rand(2)

    assert as_on_cuda(draws, (8, 0))().shape == (2,)


def test_a_disguised_function_sees_a_gpu_and_makes_shapes() -> None:
    def asks(x: Tensor) -> tuple[str, tuple[int, int], Tensor, Tensor]:
        device = x.device
        capability = torch.cuda.get_device_capability(device)
        return device.type, capability, torch.zeros(3, device=device), x.to(device)

    kind, capability, made, moved = as_on_cuda(asks, (8, 6))(meta(2))
    assert (kind, capability) == ("cuda", (8, 6))
    assert made.is_meta
    assert moved.is_meta
    assert as_on_cuda(lambda x: x.device, (8, 6))(torch.ones(1)).type == "cpu"


@pytest.mark.parametrize(
    ("gpu", "precision", "whole"),
    [
        ("h100", "bf16", 0),  # added up in place, in bf16
        ("h100", "bf16-mixed", 1),  # in place, in fp32
        ("v100-32gb", "fp16", 4),  # a copy in fp32 for each chunk
        ("h100", "fp32", 1 + 4),
    ],
)
def test_fused_linear_adds_up_the_heads_gradient(gpu: str, precision: str, whole: int) -> None:
    """32 tokens in chunks of 8: 264 is at most 5 x 64, and 8 is the next power of two of 32 / 5."""
    pytest.importorskip("liger_kernel")
    _, memory = simulate(tiny(precision=precision, loss="fused_linear"), find_hardware(gpu))
    sizes = [span.size_bytes for span in memory.spans if span.birth_phase == "forward"]
    assert sizes.count(264 * 64 * 4) == whole


def test_products_into_given_memory_keep_no_workspace_of_cublaslt() -> None:
    pytest.importorskip("liger_kernel")
    profile, _ = simulate(tiny(precision="bf16", loss="fused_linear"), find_hardware("h100"))
    kept = TorchRelease.of(torch.__version__).keeps_cublas_workspaces
    scalars_bytes = profile.memory.at_peak.other_bytes - kept * 2 * 32 * MIB
    assert 0 <= scalars_bytes < 4096


@pytest.mark.parametrize(("gpu", "product"), [("t4", "grouped_mm_fallback"), ("h100", "_grouped_mm")])
def test_experts_are_looped_over_where_the_gpu_is_too_old(
    gpu: str, product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(moe, "_grouped_mm_fallback_bwd"):
        pytest.skip("this transformers loops in Python, over counts that shapes do not have")
    ran: set[str] = set()
    run = SimulatedDevice.run

    def seen(self: SimulatedDevice, func: Any, args: Any, kwargs: Any) -> Any:
        ran.add(func._overloadpacket.__name__)
        return run(self, func, args, kwargs)

    monkeypatch.setattr(SimulatedDevice, "run", seen)
    profile, _ = simulate(tiny("mixtral", precision="fp16"), find_hardware(gpu))
    assert profile.warnings == []
    assert {"grouped_mm_fallback", "_grouped_mm"} & ran == {product}


def test_where_autocast_is_switched_off_products_stay_in_fp32() -> None:
    """transformers' rotary embeddings in many models: maybe_autocast does nothing for the device "meta"."""
    from transformers.models.nemotron import modeling_nemotron as modeling

    theirs = modeling.maybe_autocast
    with as_on("h100"), torch.autocast("meta", torch.bfloat16):
        with modeling.maybe_autocast("meta", enabled=False):
            assert (meta(2, 3) @ meta(3, 4)).dtype == torch.float32
        assert (meta(2, 3) @ meta(3, 4)).dtype == torch.bfloat16
    assert modeling.maybe_autocast is theirs


def test_autocast_casts_nothing_for_a_product_into_given_memory() -> None:
    out = meta(2, 4)
    with as_on("h100"), torch.autocast("meta", torch.bfloat16), torch.no_grad(), Operators() as ran:
        torch.mm(meta(2, 3), meta(3, 4), out=out)
    assert ran.names == ["empty.memory_format"] * 2 + ["mm.out"]


def test_the_names_of_what_is_replaced_exist() -> None:
    pytest.importorskip("liger_kernel")
    recipe = tiny(loss="fused_linear", kernels="liger", optimizer="paged_adamw")
    gpu = Gpu((9, 0), 132, TorchRelease(2, 13))
    targets = [each.target for each in library_replacements(recipe, gpu, {}, lambda: None)]
    assert len(targets) > 5
    with all_replaced(Replacement(target, None, "for a test") for target in targets):
        assert resolve_name(targets[-1]) is None
    assert resolve_name(targets[-1]) is not None


def test_a_name_that_a_library_has_no_more_is_refused_with_its_version() -> None:
    gone = Replacement("torch.nn.functional.softmax_of_old", None, "makes a copy")
    there = Replacement("torch.tensor", None, "makes a tensor")
    said = r"torch 2\.\d+.* has no torch\.nn\.functional\.softmax_of_old"
    with pytest.raises(InputError, match=said), all_replaced([there, gone]):
        pass
    assert torch.tensor(1) == 1


def test_a_class_keeps_what_it_inherits() -> None:
    class Above:
        def name(self) -> str:
            return "above"

    class Below(Above):
        pass

    with replaced(Below, "name", lambda _: "replaced"):
        assert Below().name() == "replaced"
    assert "name" not in vars(Below)
    assert Below().name() == "above"
