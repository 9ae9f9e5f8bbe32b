"""What CUDA operators take inside, rule by rule, each size worked out by hand from the source it names.

A script is written as a line: +n takes n bytes, -i gives back the i-th of them, =j makes output j. Sources
are under pytorch's aten/src/ATen/native (torch 2.13), or in bitsandbytes/backends/cuda/ops.py (0.50).
"""

import json
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from harness.formula import radix_sort_scratch, scan_scratch
from harness.hardware.hardware import find_hardware
from harness.kernels import Free, Gpu, Keep, Take
from harness.kernels.operators import OPERATORS, UNKNOWN, operator_name, script_of, unknown_ops
from harness.kernels.sorting import scan_tile, sort_tile
from harness.simulate.simulated_run import simulate
from harness.system import TorchRelease
from tests.support.places import RECORDINGS
from tests.support.tiny import tiny

aten = torch.ops.aten
H100 = Gpu((9, 0), 132, TorchRelease(2, 13))
A100 = Gpu((8, 0), 108, TorchRelease(2, 13))
L4 = Gpu((8, 9), 58, TorchRelease(2, 13))
RULES = {name: known.script for name, known in OPERATORS.items() if known.script is not None}
FP32, BF16, BOOL, LONG = torch.float32, torch.bfloat16, torch.bool, torch.int64
MANY = 1 << 20


def meta(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def written(steps: Any) -> str:
    words = []
    for step in steps:
        if isinstance(step, Take):
            words.append(f"+{step.size_bytes}")
        elif isinstance(step, Keep):
            words.append(step.library)
        else:
            words.append(f"-{step.temporary}" if isinstance(step, Free) else f"={step.index}")
    return " ".join(words)


class _Seen(TorchDispatchMode):
    """The script of the only operator called."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        script = script_of(func, args, kwargs or {}, out, self.gpu)
        if operator_name(func) in RULES:
            self.found.append((operator_name(func), written(script)))
        return out


def seen(call: Callable[[], Any], gpu: Gpu = H100) -> tuple[str, str]:
    with _Seen(gpu) as mode:
        call()
    (only,) = mode.found
    return only


def with_result(func: Any, *args: Any, out: Any, gpu: Gpu = H100) -> tuple[str, str]:
    """For an operator whose result shape functions cannot give."""
    return operator_name(func), written(script_of(func, args, {}, out, gpu))


# Reductions over everything, of 2**20 numbers: 2**20 / 4 a load (input_vec_size) in blocks of 512 threads. A
# thread has 2048 values (setReduceConfig counts 512 a step): at least 256, so blocks share the output. A grid
# of 132 * 2048 / 512 = 528 would fill the GPU; 2048 / 16 = 128 blocks are enough: 128 partial results, and
# one semaphore of 4 bytes (cuda/Reduce.cuh).
REDUCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "sum": (lambda: meta(MANY).sum(), "=0 +512 +4 -1 -0"),
    "sum of 16 bit, in fp32": (lambda: meta(MANY, dtype=BF16).sum(), "=0 +512 +4 -1 -0"),
    "mean": (lambda: meta(MANY).mean(), "=0 +512 +4 -1 -0"),
    "norm": (lambda: torch.linalg.vector_norm(meta(MANY)), "=0 +512 +4 -1 -0"),
    "amax": (lambda: meta(MANY).amax(), "=0 +512 +4 -1 -0"),
    "max": (lambda: meta(MANY).max(), "=0 +512 +4 -1 -0"),
    "min": (lambda: meta(MANY).min(), "=0 +512 +4 -1 -0"),
    "all": (lambda: meta(MANY, dtype=BOOL).all(), "=0 +128 +4 -1 -0"),
    "any": (lambda: meta(MANY, dtype=BOOL).any(), "=0 +128 +4 -1 -0"),
    "isinf": (lambda: meta(MANY).isinf(), f"+{4 * MANY} =0 -0"),
    "all, by its own name": (lambda: aten._is_all_true(meta(MANY, dtype=BOOL)), "=0 +128 +4 -1 -0"),
    # recorded on a virtual GPU
    "product of all": (lambda: meta(MANY).prod(), "=0 +512 +4 -1 -0"),
    "product of all integers": (lambda: meta(MANY, dtype=LONG).prod(), "=0 +1024 +4 -1 -0"),
    # few values: one block each
    "small sum": (lambda: meta(100).sum(), "=0"),
    "sum of rows": (lambda: meta(4096, 256).sum(-1), "=0"),
    # ReduceOps.cpp, make_reduction_from_out_ty: 100 numbers as int64 first, after the output
    "sum of bools": (lambda: meta(100, dtype=BOOL).sum(), "=0 +800 -0"),
    "max of a transposed matrix": (lambda: meta(3, 4).t().max(), "=0 +48 -0"),
    "max with indices": (lambda: meta(3, 4).max(dim=1), "=0 =1"),
    # cuda/ForeachReduceOp.cu: chunks of 65536: 3 and 1. A row of 3 results for each, fp32.
    # recorded on a virtual GPU, bf16: +128 +128 +64 -64 -128 +128000 +128 -128000 -128
    "logsumexp": (lambda: meta(64, 1000, dtype=BF16).logsumexp(1), "+128 +128 +64 -2 -1 +128000 =0 -3 -0"),
    # recorded on a virtual GPU
    "argmax of long rows": (lambda: meta(64, 131_072, dtype=torch.int32).argmax(-1), "=0 +9216 +256 -1 -0"),
    "argmax of one row": (lambda: meta(1, 1 << 21, dtype=torch.int32).argmax(-1), "=0 +4096 +4 -1 -0"),
    "argmax": (lambda: meta(8, 2048, dtype=torch.int32).argmax(-1), "=0"),
    "norms": (lambda: torch._foreach_norm([meta(2 * 65536 + 1), meta(10)]), "+24 =0 =1 -0"),
    # native/transformers/attention.cpp: 192 scores == -inf, 24 rows of them, a zero
    "safe softmax": (lambda: aten._safe_softmax(meta(2, 3, 4, 8), -1), "=0 +192 +24 +4 -2 -1 -0"),
}


@pytest.mark.parametrize(("call", "script"), REDUCTIONS.values(), ids=REDUCTIONS.keys())
def test_reductions(call: Callable[[], Any], script: str) -> None:
    assert seen(call)[1] == script


def test_norms_since_torch_2_15() -> None:
    """A list of where each tensor's results start (3 numbers of 8 bytes), and 3 + 1 results."""
    norms = REDUCTIONS["norms"][0]
    assert seen(norms, Gpu((9, 0), 132, TorchRelease(2, 15)))[1] == "+24 +16 =0 =1 -1 -0"


def short_convolution_backward(*mask: bool) -> Any:
    """Of 4 rows of 128 tokens and 544 channels, whose input and gradient are transposed."""
    x, gradient = (meta(4, tokens, 544, dtype=BF16).transpose(1, 2) for tokens in (128, 131))
    how = ([1], [3], [1], False, [0], 544)
    return aten.convolution_backward(gradient, x, meta(544, 1, 4, dtype=BF16), [544], *how, list(mask))


def masked_attention_backward() -> Any:
    """Of 2 rows of 128 tokens with 2 heads, whose mask has a gradient."""
    q, mask = meta(2, 2, 128, 64, dtype=BF16), meta(2, 2, 128, 128, dtype=BF16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    seed = meta(dtype=LONG)
    return aten._scaled_dot_product_efficient_attention_backward(
        q, q, q, q, mask, q, meta(2, 2, 128), seed, seed, 0.0, [True] * 4
    )


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    # native/Pow.cpp: a number becomes a tensor of one double
    "number to the power of a tensor": (lambda: 2.0 ** meta(100), "=0 +8 -0"),
    "tensor to the power of a number": (lambda: meta(100) ** 2.0, "=0"),
    # cuda/SoftMax.cu
    "softmax": (lambda: meta(4, 8).softmax(-1), "=0"),
    "softmax of a transposed matrix": (lambda: meta(8, 4).t().softmax(-1), "=0 +128 -0"),
    "log softmax": (lambda: meta(4, 8).log_softmax(-1), "=0"),
    "softmax backward": (lambda: aten._softmax_backward_data(meta(4, 8), meta(4, 8), -1, FP32), "=0 +128 -0"),
    "softmax backward of a transposed gradient": (
        lambda: aten._softmax_backward_data(meta(8, 4).t(), meta(4, 8), -1, FP32),
        "=0 +128 +128 -1 -0",
    ),
    # cuda/layer_norm_kernel.cu
    "layer norm": (lambda: aten.native_layer_norm(meta(4, 8), [8], meta(8), meta(8), 1e-5), "=0 =1 =2"),
    "layer norm backward of a transposed gradient": (
        lambda: aten.native_layer_norm_backward(
            meta(8, 4).t(), meta(4, 8), [8], meta(4, 1), meta(4, 1), meta(8), meta(8), [True] * 3
        ),
        "=0 =1 =2 +128 -0",
    ),
    # transformers/cuda/attention_backward.cu: the gradient of a mask comes with the others (recorded on a
    # virtual GPU, of a model with masks that it learns), then delta and the workspace of 8 blocks
    "masked attention backward": (
        masked_attention_backward,
        f"=0 =1 =2 =3 +2048 +{8 * (16 + 64 * 64 * 4)} -0 -1",
    ),
    # cuda/Dropout.cu: the mask comes first
    "dropout": (lambda: torch.native_dropout(meta(100), 0.1, True), "=1 =0"),
    # TensorAdvancedIndexing.cpp
    "one index": (lambda: meta(10, 10)[meta(4, dtype=LONG)], "=0"),
    # TensorCompare.cpp, where_self_out
    "where": (lambda: torch.where(meta(10, dtype=BOOL), meta(10), meta(10)), "=0"),
    # native/Embedding.cpp: positions that are broadcast to all rows become one row
    "embedding": (lambda: aten.embedding(meta(10, 4), meta(2, 8, dtype=LONG)), "=0"),
    "embedding of broadcast positions": (
        lambda: aten.embedding(meta(10, 4), meta(1, 8, dtype=LONG).expand(2, 8)),
        f"+{2 * 8 * 8} =0 -0",
    ),
    # UnfoldBackward.cpp: the windows of a short convolution overlap
    "windows that overlap, backward": (
        lambda: aten.unfold_backward(meta(2, 16, 128, 4), [2, 16, 131], 2, 4, 1),
        f"=0 +{131 * 8} -0",
    ),
    "windows apart, backward": (lambda: aten.unfold_backward(meta(2, 32, 4), [2, 128], 1, 4, 4), "=0"),
    # cuda/Sort.cpp: the positions 0, 1, 2 ...; up to 4096 numbers no more
    "sort": (lambda: meta(100, dtype=LONG).sort(), "=0 =1 +800 -0"),
    # ReduceOps.cpp converts, cuda/ScanKernels.cpp: not over everything, no scratch
    "cumulative sum of rows": (lambda: meta(4, 10, dtype=torch.int32).cumsum(-1), "=0 +320 -0"),
    # cuda/Indexing.cu: sums by index sort it. 2.13 looks at its bounds first (aminmax, two comparisons).
    "index_put": (lambda: aten.index_put(meta(50, 8), [meta(100, dtype=LONG)], meta(100, 8)), "=0"),
    "index_put_, accumulating": (
        lambda: aten.index_put_(meta(50, 8), [meta(100, dtype=LONG)], meta(100, 8), True),
        "+8 +8 +1 -2 +1 -3 -1 -0 +800 +800 -4 +800 +800 +800 +1 -9 -8 -7 -6 -5",
    ),
    "index_put_, accumulating, unchecked": (
        lambda: aten._index_put_impl_(meta(50, 8), [meta(100, dtype=LONG)], meta(100, 8), True, True),
        "+800 +800 -0 +800 +800 +800 +1 -5 -4 -3 -2 -1",
    ),
    # recorded on a virtual GPU
    "index_put_, accumulating by two indices": (
        lambda: aten._index_put_impl_(
            meta(5000, 16, 3), [meta(5000, dtype=LONG)] * 2, meta(5000, 3), True, True
        ),
        "+40000 +40000 -0 +40000 +40000 -2 -3 +40000 +40000 +40000 +89087 -7 -6 -5 -4 -1",
    ),
    "product added in place": (lambda: meta(4, 4).addmm_(meta(4, 8), meta(8, 4)), "=0 cublas"),
    "product of two rows": (lambda: meta(4).dot(meta(4)), "=0 cublas"),
    "product in fp8": (
        lambda: torch._scaled_mm(
            *(
                meta(16, 32, dtype=torch.float8_e4m3fn),
                meta(16, 32, dtype=torch.float8_e4m3fn).t(),
                meta(),
                meta(),
            ),
            out_dtype=BF16,
        ),
        "=0 cublas",
    ),
    # a short convolution, one channel a group, recorded on a virtual GPU:
    # +557056 +570112 +4352 +557056 -570112 +1088 -557056
    "short convolution backward": (
        lambda: short_convolution_backward(True, True, True),
        "+557056 +570112 =1 =0 -1 =2 -0",
    ),
    "of its input": (lambda: short_convolution_backward(True, False, False), "+557056 +570112 =0 -1 -0"),
    "of its weight": (lambda: short_convolution_backward(False, True, False), "+557056 +570112 =1 -1 -0"),
    # cuda/GroupMM.cu: 60 bytes a group, and 512 a multiprocessor; 4 x 3 pointers, 3 x 3 strides, 3 x 3 sizes
    "grouped product, an odd number": (
        lambda: torch._grouped_mm(
            meta(64, 32, dtype=BF16), meta(3, 32, 16, dtype=BF16), offs=meta(3, dtype=torch.int32)
        ),
        f"=0 +{12 * 8 + 9 * 8 + 9 * 4} +{132 * 512} -1 -0",
    ),
}


@pytest.mark.parametrize(("call", "script"), OTHERS.values(), ids=OTHERS.keys())
def test_other_operators(call: Callable[[], Any], script: str) -> None:
    assert seen(call)[1] == script


def test_a_very_tall_layer_norm_sums_its_weights_gradients_in_two_steps() -> None:
    """cuda/layer_norm_kernel.cu, LaunchGammaBetaBackwardCUDAKernel: more than 65536 rows of 32 columns.

    Gradients of weight and bias (128 bytes each) that are dropped, partial ones of 131072 / 32 rows x 32
    fp32. Their sum over 4096 rows, as cuda/Reduce.cuh: 4 columns a load, blocks of 8 x 16; 4096 / 16 = 256
    values a thread, so 256 / 16 = 16 blocks share: 16 x 32 fp32 for each of 8 x 4 lanes, and a semaphore.
    """
    tall = meta(131072, 32)
    statistics = meta(131072, 1)
    given = (tall, tall, [32], statistics, statistics, meta(32), meta(32), [True, True, True])
    assert seen(lambda: aten.native_layer_norm_backward(*given))[1] == (
        "=0 +128 +128 +524288 +524288 =1 +65536 +4 -5 -4 -0 =2 +65536 +4 -7 -6 -1 -2 -3"
    )
    flat = meta(100, 32)
    given = (flat, flat, [32], meta(100, 1), meta(100, 1), meta(32), meta(32), [True, True, True])
    assert seen(lambda: aten.native_layer_norm_backward(*given))[1] == "=0 =1 =2"


def test_scratch_of_a_radix_sort() -> None:
    """cub's onesweep of 10,000 pairs of 8-byte keys and values on 17 bits, on an H100: 3 passes of 8 bits.

    Histograms 3 x 256 x 8 bytes, a row of 256 x 4 for each of 3 tiles of 4608, the other halves of the double
    buffers 80,000 (aligned to 80,128) each, 3 counters (256), and 255 to align the first.
    """
    assert radix_sort_scratch(10_000, 17, sort_tile(H100)) == 6144 + 3072 + 80_128 + 80_128 + 256 + 255
    assert radix_sort_scratch(2304, 64, sort_tile(H100)) == 1
    # one pass needs no other halves: 256 x 8, 3 rows of 256 x 4, a counter, and 255
    assert radix_sort_scratch(10_000, 8, sort_tile(H100)) == 2048 + 3072 + 256 + 255


def test_scratch_of_a_scan() -> None:
    """1000 of 8 bytes: 2 tiles of 128 x 7 and 32 more, 16 bytes each (544 aligned to 768), one byte, 255. Of
    4 bytes a thread has 15, and of 2 bytes 30: 10,000 are 6 tiles of 8 bytes, or 3 of 4.
    """
    assert scan_scratch(1000, 8, scan_tile(8)) == 768 + 256 + 255
    assert scan_scratch(10_000, 4, scan_tile(4)) == (6 + 32) * 8 + 208 + 256 + 255
    assert scan_scratch(10_000, 2, scan_tile(2)) == (3 + 32) * 4 + 116 + 256 + 255


def test_gradients_in_fp16_that_are_summed_in_fp32_are_filled_up_one_by_one() -> None:
    """native/TensorShape.cpp, _pad_chunk: 15 rows become 16; 16 rows stay what they are."""
    from torch.distributed.fsdp import fully_shard

    assert fully_shard  # whose import defines the operator
    gradients = [meta(15, 512, dtype=torch.float16), meta(16, 512, dtype=torch.float16)]
    func, named = torch.ops.fsdp.chunk_cat.default, {"out": meta(8, 2048)}
    script = script_of(func, (gradients, 0, 8), named, None, H100)
    assert [step.size_bytes for step in script if isinstance(step, Take)] == [16 * 512 * 2]


# ---- bitsandbytes ------------------------------------------------------------------------------------


@pytest.fixture
def bitsandbytes() -> Any:
    pytest.importorskip("bitsandbytes")
    return torch.ops.bitsandbytes


def packed(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.uint8)


def gemm_4bit(
    func: Any, rows: int, *, double_quant: bool = False, biased: bool = False, gpu: Gpu = H100
) -> str:
    """x (rows, 64) @ w (128, 64) in NF4, blocks of 64: 128 scales."""
    names = [argument.name for argument in func._schema.arguments]
    given = {"A": meta(rows, 64, dtype=BF16), "B": packed(4096, 1), "shapeB": [128, 64], "blocksize": 64}
    given |= {"absmax": meta(128), "absmax_8bit": packed(128) if double_quant else None}
    given |= {"bias": meta(128, dtype=BF16) if biased else None}
    args = [given.get(name) for name in names]
    return with_result(func, *args, out=meta(rows, 128, dtype=BF16), gpu=gpu)[1]


def test_a_4_bit_weight_is_dequantized_whole_for_many_rows(bitsandbytes: Any) -> None:
    """128 x 64 in bf16. With double quantization also 128 fp32 scales, and once more with their offset."""
    func = bitsandbytes.gemm_4bit.default
    assert gemm_4bit(func, 2000) == "+16384 =0 cublas -0"
    assert gemm_4bit(func, 2000, double_quant=True) == "+512 +512 +16384 =0 cublas -1 -0 -2"
    before_2_12 = Gpu((9, 0), 132, TorchRelease(2, 11))  # where cuBLASLt, which adds a bias, has its own
    assert gemm_4bit(func, 2000, biased=True, gpu=before_2_12) == "+16384 =0 cublas cublaslt -0"
    assert gemm_4bit(func, 1, double_quant=True) == "=0"
    assert gemm_4bit(func, 16, double_quant=True) == "=0"  # so small a weight, says bitsandbytes' table


def test_8_bit_products_are_int32_then_fp16(bitsandbytes: Any) -> None:
    func = bitsandbytes.int8_mixed_scaled_mm.default
    names = [argument.name for argument in func._schema.arguments]

    def script(dtype: torch.dtype) -> str:
        given = {"A": meta(16, 64, dtype=dtype), "CA": meta(16, 64, dtype=torch.int8)}
        given |= {"CB": meta(128, 64, dtype=torch.int8)}
        out = (meta(16, 128, dtype=dtype), meta(0))
        return with_result(func, *[given.get(name) for name in names], out=out)[1]

    assert script(torch.float16) == f"+{16 * 128 * 4} =0 -0"
    assert script(BF16) == f"+{16 * 128 * 4} +{16 * 128 * 2} =0 -1 -0"


def test_outliers_are_looked_for_with_torch_operators(bitsandbytes: Any) -> None:
    """abs (bf16), > threshold (bool), any(), and the 0 that would be written."""
    func = bitsandbytes.int8_vectorwise_quant.default
    out = (meta(16, 64, dtype=torch.int8), meta(16), None)
    rows = meta(16, 64, dtype=BF16)
    assert with_result(func, rows, 0.0, out=out)[1] == "=1 =0"
    assert with_result(func, rows, 6.0, out=out)[1] == "=1 =0 +2048 +1024 -0 +1 -2 +1 -3 -1"


# ---- all of them -------------------------------------------------------------------------------------


PRODUCTS = json.loads((RECORDINGS / "matrix_products" / "h200-torch-2.13.json").read_text())["calls"]
RECORDED = {f"aten::{call['operator']}" for call in PRODUCTS} | {
    *(name for name in RULES if any(part in name for part in ("attention", "fsdp::", "bitsandbytes::"))),
    *("aten::_fused_rms_norm", "aten::equal", "aten::repeat_interleave", "aten::linalg_solve_triangular"),
    *("aten::masked_scatter", "aten::masked_scatter_backward", "aten::convolution"),
    *("aten::_log_softmax_backward_data", "aten::_fused_rms_norm_backward", "aten::embedding_dense_backward"),
}
"""Held to the byte by what PyTorch's CUDA build allocated: tests/kernels/test_recorded_calls.py and
tests/simulate/test_recorded_traces.py. What no recording has of them is in this folder."""
BY_NAME = {"aten::native_layer_norm_backward"}


def test_every_rule_is_tested() -> None:
    tested = {seen(call)[0] for call, _ in (*REDUCTIONS.values(), *OTHERS.values())}
    assert tested | BY_NAME | RECORDED >= RULES.keys()


def test_what_takes_nothing_has_a_reason_and_no_script() -> None:
    assert not [name for name, known in OPERATORS.items() if known.script and known.nothing]
    assert script_of(aten.add.Tensor, (meta(4), meta(4)), {}, meta(4), H100) == ()


NEWER = {"fsdp::chunk_cat_mixed_dtype": (2, 15), "fsdp::record_grad_output_stream": (2, 15)}
"""Operators by the release of PyTorch that has them first."""


def test_every_declared_operator_exists_and_has_the_arguments_of_its_rule() -> None:
    pytest.importorskip("bitsandbytes")
    given = {"script", "gpu", "outputs"}
    looked_up = 0
    for name, known in OPERATORS.items():
        if name.partition("::")[0] in ("transformers", "harness"):
            continue
        namespace, _, operator = name.partition("::")
        if TorchRelease.of(torch.__version__) < NEWER.get(name, (0, 0)):
            assert not hasattr(getattr(torch.ops, namespace), operator)
            continue
        packet = getattr(getattr(torch.ops, namespace), operator)
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
        named = {argument.name for schema in schemas for argument in schema.arguments}
        looked_up += 1
        if known.script is not None:
            needed = {p.name for p in signature(known.script).parameters.values() if p.default is p.empty}
            assert needed - given <= named, name
    assert looked_up > 150


def test_an_operator_nobody_has_looked_at_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_ops(["aten::mm", "aten::add", "aten::kthvalue"]) == ["aten::kthvalue"]
    monkeypatch.setitem(OPERATORS, "aten::silu", UNKNOWN)
    (warning,) = simulate(tiny(), find_hardware("h100"))[0].warnings
    assert warning.endswith("nobody has looked at: aten::silu")


def test_hidden_memory_of_composite_operators_is_what_torch_says() -> None:
    """Their host code is the same for every device: PyTorch's profiler sees what they take on a CPU."""

    def inside(call: Callable[[], Any]) -> int:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            call()
        return sum(e.cpu_memory_usage for e in recorded.events() if e.name in inner and e.cpu_parent)

    inner = {"aten::isneginf", "aten::all", "aten::scalar_tensor", "aten::to"}
    scores, mask = torch.zeros(2, 3, 4, 8), torch.zeros(10, dtype=BOOL)
    assert inside(lambda: aten._safe_softmax(scores, -1)) == 192 + 24 + 4
    assert inside(lambda: torch.where(mask, torch.zeros(10, dtype=BF16), torch.zeros(10))) == 40
