"""Work that the virtual GPU's clock describes in words costs what the same operator costs a simulation, whose
tensors have shapes alone."""

import json
from typing import Any

import pytest
import torch

from harness.errors import InputError
from harness.hardware import NETWORK, find_hardware
from harness.kernel_time import collective, product
from harness.kernels import Described, Gpu, operator_cost, script_of
from harness.kernels.described import Estimate

H100 = find_hardware("h100")
DESCRIBED = Described(H100)
aten = torch.ops.aten


NAMES = {
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.int64: "Long",
    torch.float8_e4m3fn: "Float8_e4m3fn",
}


def in_words(value: Any) -> Any:
    """As c/operators.cpp writes an argument."""
    if isinstance(value, torch.Tensor):
        sizes, strides = list(value.shape), list(value.stride())
        return {"dtype": NAMES[value.dtype], "device": "cuda", "sizes": sizes, "strides": strides}
    if isinstance(value, torch.dtype):
        return None
    return [in_words(each) for each in value] if isinstance(value, list) else value


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


FP8 = torch.float8_e4m3fn
CALLS = {
    "aten::mm.": (aten.mm.default, [meta(512, 1024), meta(2048, 1024).t()]),
    "aten::_scaled_mm.": (
        aten._scaled_mm.default,
        [
            *(meta(512, 1024, dtype=FP8), meta(2048, 1024, dtype=FP8).t()),
            *[meta(dtype=torch.float32)] * 2,
            *(None, None, torch.bfloat16),
        ],
    ),
    "aten::addmm.": (aten.addmm.default, [meta(2048), meta(512, 1024), meta(1024, 2048)]),
    "aten::add.Tensor": (aten.add.Tensor, [meta(1 << 20), meta(1 << 20)]),
    "aten::mul_.Tensor": (aten.mul_.Tensor, [meta(1 << 20), meta(1)]),
    "aten::embedding.": (aten.embedding.default, [meta(1000, 64), meta(4, 32, dtype=torch.int64)]),
    "aten::_softmax.": (aten._softmax.default, [meta(64, 4096), -1, False]),
    "aten::cat.": (aten.cat.default, [[meta(64, 32), meta(64, 64)], 1]),
    "aten::_foreach_add_.List": (aten._foreach_add_.List, [[meta(4096)] * 3, [meta(4096)] * 3]),
    "aten::_scaled_dot_product_flash_attention.": (
        aten._scaled_dot_product_flash_attention.default,
        [*[meta(2, 8, 512, 64)] * 3, 0.0, True],
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward.": (
        aten._scaled_dot_product_cudnn_attention_backward.default,
        # rows of one length have no cumulative ones: tensors that are not defined
        [
            *(*[meta(2, 8, 512, 64)] * 5, meta(2, 8, 512, 1, dtype=torch.float32)),
            *[meta(1, dtype=torch.int64)] * 2,
            *(None, None, None, 512, 512, 0.0, True),
        ],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_costs_what_it_costs_a_simulation(name: str) -> None:
    func, args = CALLS[name]
    out = func(*args)
    cost = operator_cost(
        H100, func, args, {}, out, script_of(func, args, {}, out, Gpu.of(H100, torch.__version__))
    )
    found = DESCRIBED.operator(name, json.dumps([in_words(each) for each in args]))
    assert found[:4] == (max(cost.seconds, DESCRIBED.bare_s), cost.kernel_class, cost.flops, False)
    assert (found.held_s, found.missed_s) == (cost.held_s, cost.missed_s)


@pytest.mark.parametrize(
    ("name", "letters"),
    [("aten::addmm.", "rrr--|w"), ("aten::mul_.Tensor", "br|-"), ("aten::embedding.", "-r---|w")],
)
def test_what_an_operator_reads_and_writes(name: str, letters: str) -> None:
    """What is looked up is not read as a whole, and a result that is an argument counts there."""
    inputs = json.dumps([in_words(each) for each in CALLS[name][1]])
    assert DESCRIBED.operator(name, inputs).accesses == letters


def test_products_of_an_operator_that_nobody_knows_are_those_that_it_gave_to_cublas() -> None:
    inputs = json.dumps([in_words(meta(64, 64))])
    found = DESCRIBED.operator("aten::matrix_exp.", inputs, "fp32 64 64 64 1;fp32 64 64 64 1;")
    assert found.is_unknown
    assert found.flops == 2 * 2 * 64**3
    assert found.seconds >= 2 * product(H100, "fp32", 64, 64, 64)


def test_an_operator_of_a_sparse_tensor_is_unknown() -> None:
    """Which c/operators.cpp does not describe."""
    found = DESCRIBED.operator("aten::mm.", json.dumps(["sparse", in_words(meta(64, 64))]))
    assert found == Estimate(DESCRIBED.bare_s, "unknown", 0, True)


def test_what_is_put_on_a_stream_by_itself() -> None:
    seconds, flops = product(H100, "bf16", 512, 2048, 1024, 4), 2 * 512 * 2048 * 1024 * 4
    assert DESCRIBED.alone("product bf16 512 2048 1024 4;") == Estimate(seconds, "product", flops, False)
    within, across = (DESCRIBED.alone(f"collective all_reduce 1048576 {ranks}").seconds for ranks in (8, 16))
    assert within == collective(H100, "all_reduce", 2**20, 8, 8, network=NETWORK.value)
    assert across == collective(H100, "all_reduce", 2**20, 16, 8, network=NETWORK.value)
    assert DESCRIBED.alone("kernel somebody_s").is_unknown


def test_a_dtype_that_the_device_does_not_compute_in_is_refused() -> None:
    t4 = Described(find_hardware("t4"))
    inputs = json.dumps([in_words(meta(64, 64)), in_words(meta(64, 64))])
    with pytest.raises(InputError, match="bf16"):
        t4.operator("aten::mm.", inputs)
