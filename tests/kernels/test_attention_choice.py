"""Which attention kernel CUDA runs, and what it takes: the checks of sdp_utils.cpp one by one.

Sources under pytorch's aten/src/ATen/native/transformers: cuda/sdp_utils.cpp (which kernel; each case names
the check), cuda/flash_attn/flash_api.cpp, cuda/attention.cu, cuda/attention_backward.cu and
cuda/mem_eff_attention/kernel_backward.h (what it takes). Bytes are worked out in the tests.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.kernels import AttentionCall, Free, Take, chosen_backend, script_of
from harness.kernels.gpu import Gpu, capability_of
from harness.simulate.cuda.attention_call import attention_on_meta
from harness.system import TorchRelease

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
H100, A100 = Gpu((9, 0), 132, TorchRelease(2, 13)), Gpu((8, 0), 108, TorchRelease(2, 13))


def chosen(capability: str = "8.0", version: str = "2.13.0", **how: Any) -> str:
    """The kernel for 2 x 8 heads x 512 x 64 in bf16, causal, without a mask, trained, unless told."""
    heads, key_heads = how.pop("heads", 8), how.pop("key_heads", how.get("heads", 8))
    length, keys, width = how.pop("length", 512), how.pop("keys", 512), how.pop("width", 64)
    value_width = how.pop("value_width", width)
    mask = how.pop("mask", None)
    given: dict[str, Any] = {
        "dtype": BF16,
        "dropout_p": 0.0,
        "is_causal": mask is None,
        "enable_gqa": key_heads != heads,
        "requires_grad": True,
    }
    call = AttentionCall(
        query=(2, heads, length, width),
        key=(2, key_heads, keys, width),
        value=(2, key_heads, keys, value_width),
        mask=mask,
        capability=capability_of(capability),
        torch=TorchRelease.of(version),
        **{**given, **how},
    )
    return chosen_backend(call)


CHOICES: list[tuple[str, dict[str, Any], str]] = [
    ("sdp_priority_order: flash first", {}, "flash"),
    ("check_prefer_cudnn_attention: Hopper", {"capability": "9.0"}, "cudnn"),
    ("check_prefer_cudnn_attention: not on consumer Blackwell", {"capability": "12.0"}, "flash"),
    ("check_prefer_cudnn_attention: B300 since 2.13, others of 10.x", {"capability": "10.3"}, "cudnn"),
    ("check_for_attn_mask: flash takes none", {"mask": (2, 1, 512, 512)}, "efficient"),
    (
        "check_attn_mask_shape: none that is trained",
        {"capability": "9.0", "mask": (2, 1, 512, 512), "mask_requires_grad": True},
        "efficient",
    ),
    ("check_attn_mask_shape: cuDNN takes one", {"capability": "9.0", "mask": (2, 1, 512, 512)}, "cudnn"),
    ("check_dtypes_flash_attention: no fp32", {"dtype": FP32}, "efficient"),
    ("check_flash_attention_hardware_support: T4", {"capability": "7.5", "dtype": FP16}, "efficient"),
    ("can_use_mem_efficient_attention: no bf16 before Ampere", {"capability": "7.5"}, "math"),
    ("check_head_dim_size_flash: at most 256", {"width": 256}, "flash"),
    ("check_head_dim_size_flash: at most 256, and 264", {"width": 264}, "efficient"),
    ("check_head_dim_size_mem_efficient: a multiple of 4", {"dtype": FP32, "width": 66}, "math"),
    ("check_head_dim_size_flash: one head dim", {"value_width": 128}, "efficient"),
    ("check_requires_grad_and_head_dim: sm89, 224", {"capability": "8.9", "width": 224}, "efficient"),
    ("the same without a gradient", {"capability": "8.9", "width": 224, "requires_grad": False}, "flash"),
    ("check_flash_causal_non_square_seqlens", {"keys": 600}, "efficient"),
    ("check_grouped_query_attention: flash groups", {"heads": 8, "key_heads": 2}, "flash"),
    ("check_grouped_query_attention: efficient does not", {"key_heads": 2, "dtype": FP32}, "math"),
    ("until 2.14", {"key_heads": 2, "dtype": FP32, "version": "2.14.0"}, "efficient"),
    ("check_cudnn_dropout: sixteenths", {"capability": "9.0", "dropout_p": 0.1}, "flash"),
    ("check_cudnn_dropout: sixteenths, one of them", {"capability": "9.0", "dropout_p": 0.125}, "cudnn"),
    ("check_cudnn_tensor_shapes: 256 on Hopper", {"capability": "9.0", "width": 256}, "cudnn"),
    ("check_cudnn_tensor_shapes: a multiple of 8", {"capability": "9.0", "width": 68}, "flash"),
    ("check_nonzero_sequence_lengths_dense", {"length": 0, "keys": 0}, "math"),
]


@pytest.mark.parametrize(("how", "kernel"), [c[1:] for c in CHOICES], ids=[c[0] for c in CHOICES])
def test_the_kernel_that_cuda_chooses(how: dict[str, Any], kernel: str) -> None:
    assert chosen(**how) == kernel


# ---- around the kernel -------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = BF16, requires_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def run(
    backend: Any, width: int = 64, mask: Tensor | None = None, heads: int = 8
) -> tuple[Tensor, list[str]]:
    query = meta(2, 8, 512, width, requires_grad=True)
    key = meta(2, heads, 512, width, requires_grad=True)
    with _Names() as mode:
        out = attention_on_meta(query, key, key, mask, 0.0, mask is None, None, heads != 8, backend)
    return out, mode.names


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn", "math"])
def test_every_kernel_gives_the_shape_and_a_gradient(backend: str) -> None:
    out, names = run(backend)
    assert (out.shape, out.dtype) == ((2, 8, 512, 64), BF16)
    assert out.grad_fn is not None
    fused = [name for name in names if name.startswith("_scaled_dot_product")]
    assert fused == ([] if backend == "math" else [f"_scaled_dot_product_{backend}_attention"])


def test_flash_pads_the_head_dim_to_a_multiple_of_8() -> None:
    """pad_last_dim<8> in attention.cpp: query, key and value are copied; the output is cut."""
    out, names = run("flash", width=60)
    assert out.shape == (2, 8, 512, 60)
    assert names.count("constant_pad_nd") == 3


def test_a_mask_of_bools_becomes_numbers() -> None:
    """convert_boolean_attn_mask: where(mask, 0, -inf), two scalars."""
    _, names = run("efficient", mask=meta(2, 1, 512, 512, dtype=torch.bool))
    assert names[:3] == ["scalar_tensor", "scalar_tensor", "where"]


def test_a_mask_with_rows_of_odd_length_is_copied() -> None:
    """preprocess_mask, is_aligned: strides of 8 numbers."""
    _, names = run("efficient", mask=meta(2, 1, 512, 512))
    assert "constant_pad_nd" not in names
    query, key = meta(2, 8, 511, 64, requires_grad=True), meta(2, 8, 511, 64)
    with _Names() as mode:
        attention_on_meta(query, key, key, meta(2, 1, 511, 511), 0.0, False, None, False, "efficient")
    assert "constant_pad_nd" in mode.names


def test_math_repeats_grouped_heads_and_computes_in_fp32() -> None:
    """_scaled_dot_product_attention_math: both operands times the root of the scale, the mask in place."""
    _, names = run("math", heads=2)
    assert names[:3] == ["_to_copy"] * 3
    assert names.count("bmm") == 2
    assert "add_" in names
    assert "_safe_softmax" in names


# ---- inside the kernel -------------------------------------------------------------------------------


def taken(func: Any, *args: Any, out: Any = None, gpu: Gpu = H100, **named: Any) -> list[int]:
    out = func(*args, **named) if out is None else out
    steps = script_of(func, args, named, out, gpu)
    assert sum(isinstance(s, Take) for s in steps) == sum(isinstance(s, Free) for s in steps)
    return [step.size_bytes for step in steps if isinstance(step, Take)]


FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default


def test_flash_forward() -> None:
    """mha_fwd: many heads take nothing. Few are split (set_params_splitkv): 1 x 4 heads x 1024 / 64 rows = 64
    blocks on 264 slots; of 1, 2 or 4 splits of 4 blocks of keys four fill most. fp32 sums and results each.
    """
    many, few = meta(8, 8, 1024, 64), meta(1, 4, 1024, 64)
    assert taken(FLASH, many, many, many, 0.0, True) == []
    assert taken(FLASH, few, few, few, 0.0, True) == [4 * 4 * 1024 * 4, 4 * 4 * 1024 * 64 * 4]


def test_flash_backward() -> None:
    """mha_bwd: softmax_d {2, 8, 384}, dq_accum {2, 384, 8, 96}: 300 rows in blocks of 128, 72 in 96. Grouped
    heads: dK and dV {2, 300, 8, 72} of every query head. Then a copy of what is not (batch, length, ...).
    """
    rows_first = meta(2, 300, 8, 72).transpose(1, 2)

    def backward(grad: Tensor, key_heads: int) -> list[int]:
        query, key = meta(2, 8, 300, 72), meta(2, key_heads, 300, 72)
        seeds = meta(2, dtype=torch.int64)
        sums = meta(2, 8, 300, dtype=FP32)
        args = (grad, query, key, key, rows_first, sums, None, None, 300, 300, 0.0, True, seeds, seeds)
        return taken(FLASH_BACKWARD, *args, out=(query, key, key))

    inside = [2 * 8 * 384 * 4, 2 * 384 * 8 * 96 * 4]
    assert backward(rows_first, 8) == inside
    assert backward(rows_first, 2) == [*inside, *[2 * 300 * 8 * 72 * 2] * 2]
    assert backward(meta(2, 8, 300, 72), 8) == [2 * 8 * 300 * 72 * 2, *inside]


EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default


def test_efficient_forward() -> None:
    """kNeedsOutputAccumulatorBuffer: 16-bit outputs wider than 128 are summed in fp32."""
    narrow, wide = meta(2, 8, 512, 128), meta(2, 8, 512, 192)
    assert taken(EFFICIENT, narrow, narrow, narrow, None, True) == []
    assert taken(EFFICIENT, wide, wide, wide, None, True) == [2 * 8 * 512 * 192 * 4]
    fp32 = meta(2, 8, 512, 192, dtype=FP32)
    assert taken(EFFICIENT, fp32, fp32, fp32, None, True) == []


def efficient_backward(width: int, dtype: torch.dtype, gpu: Gpu = A100) -> list[int]:
    query = meta(2, 8, 512, width, dtype=dtype)
    grad = meta(2, 512, 8, width, dtype=dtype).transpose(1, 2)
    seed, sums = meta(dtype=torch.int64), meta(2, 8, 512, dtype=FP32)
    args = (grad, query, query, query, None, grad, sums, seed, seed, 0.0, [True, True, True, False])
    return taken(EFFICIENT_BACKWARD, *args, out=(query, query, query, None), gpu=gpu)


def test_efficient_backward() -> None:
    """delta {2, 8, 512} fp32, and workspace_size(): for each of 16 heads 512 / 64 tiles of 64 x 64 fp32 with
    a lock of 4 numbers. 128 wide on an A100: 512 / 128 tiles of 128 x 128.
    """
    delta = 2 * 8 * 512 * 4
    assert efficient_backward(64, BF16) == [delta, 16 * 8 * (64 * 64 + 4) * 4]
    assert efficient_backward(128, BF16) == [delta, 16 * 4 * (128 * 128 + 4) * 4]


def test_efficient_backward_in_fp32() -> None:
    """delta by four operators: grad * out {2, 512, 8, 64}, its sums, and these transposed."""
    products, sums = 2 * 512 * 8 * 64 * 4, 2 * 8 * 512 * 4
    assert efficient_backward(64, FP32)[:3] == [products, sums, sums]


CUDNN = aten._scaled_dot_product_cudnn_attention.default


def test_cudnn() -> None:
    """Hopper: 128 B for the kernels and 128 B to align them. Backward first has cudnn_frontend's fp32 dQ and
    sums, 2 x 8 x 512 x (64 + 1); grouped heads make dK and dV, 2 x 8 x 512 x 64 in bf16, for each query head.
    """
    query, key = meta(2, 8, 512, 64), meta(2, 4, 512, 64)
    assert taken(CUDNN, query, query, query, None, True, 0.0, True) == [256]
    seed, sums = meta(dtype=torch.int64), meta(2, 8, 512, 1, dtype=FP32)
    func = aten._scaled_dot_product_cudnn_attention_backward.default
    rest = (sums, seed, seed, None, None, None, 512, 512, 0.0, True)
    frontend, per_query_head = 2 * 8 * 512 * (64 + 1) * 4, 2 * 8 * 512 * 64 * 2
    alone = taken(func, query, query, query, query, query, *rest, out=(query, query, query))
    grouped = taken(func, query, query, key, key, query, *rest, out=(query, key, key))
    assert alone == [frontend + 256]
    assert grouped == [frontend + 256 + 2 * per_query_head]
