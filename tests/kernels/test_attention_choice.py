"""Which attention kernel CUDA runs, and what it takes: the checks of sdp_utils.cpp one by one.

Sources under pytorch's aten/src/ATen/native/transformers: cuda/sdp_utils.cpp (which kernel; each case names
the check), cuda/flash_attn/flash_api.cpp and cuda/attention.cu (what it takes, worked out in the tests). More
of what kernels take was recorded: test_recorded_calls.py, tests/simulate/test_recorded_traces.py.
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


def test_flash_pads_the_head_dim_to_a_multiple_of_8() -> None:
    """pad_last_dim<8> in attention.cpp: query, key and value are copied; the output is cut."""
    query = meta(2, 8, 512, 60, requires_grad=True)
    with _Names() as mode:
        out = attention_on_meta(query, query, query, None, 0.0, True, None, False, "flash")
    assert out.shape == (2, 8, 512, 60)
    assert mode.names.count("constant_pad_nd") == 3


def test_a_mask_of_bools_becomes_numbers() -> None:
    """convert_boolean_attn_mask: where(mask, 0, -inf), two scalars."""
    query, mask = meta(2, 8, 512, 64, requires_grad=True), meta(2, 1, 512, 512, dtype=torch.bool)
    with _Names() as mode:
        attention_on_meta(query, query, query, mask, 0.0, False, None, False, "efficient")
    assert mode.names[:3] == ["scalar_tensor", "scalar_tensor", "where"]


@pytest.mark.parametrize(("length", "copied"), [(512, False), (511, True)])
def test_a_mask_with_rows_of_odd_length_is_copied(length: int, copied: bool) -> None:
    """preprocess_mask, is_aligned: strides of 8 numbers."""
    query, key = meta(2, 8, length, 64, requires_grad=True), meta(2, 8, length, 64)
    with _Names() as mode:
        attention_on_meta(query, key, key, meta(2, 1, length, length), 0.0, False, None, False, "efficient")
    assert ("constant_pad_nd" in mode.names) == copied


# ---- inside the kernel -------------------------------------------------------------------------------


def taken(func: Any, *args: Any, out: Any = None, gpu: Gpu = H100, **named: Any) -> list[int]:
    out = func(*args, **named) if out is None else out
    steps = script_of(func, args, named, out, gpu)
    assert sum(isinstance(s, Take) for s in steps) == sum(isinstance(s, Free) for s in steps)
    return [step.size_bytes for step in steps if isinstance(step, Take)]


FLASH = aten._scaled_dot_product_flash_attention.default


def test_flash_forward() -> None:
    """mha_fwd: many heads take nothing. Few are split (set_params_splitkv): 1 x 4 heads x 1024 / 64 rows = 64
    blocks on 264 slots; of 1, 2 or 4 splits of 4 blocks of keys four fill most. fp32 sums and results each.
    """
    many, few = meta(8, 8, 1024, 64), meta(1, 4, 1024, 64)
    assert taken(FLASH, many, many, many, 0.0, True) == []
    assert taken(FLASH, few, few, few, 0.0, True) == [4 * 4 * 1024 * 4, 4 * 4 * 1024 * 64 * 4]


EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def test_efficient_forward() -> None:
    """kNeedsOutputAccumulatorBuffer: 16-bit outputs wider than 128 are summed in fp32."""
    narrow, wide = meta(2, 8, 512, 128), meta(2, 8, 512, 192)
    assert taken(EFFICIENT, narrow, narrow, narrow, None, True) == []
    assert taken(EFFICIENT, wide, wide, wide, None, True) == [2 * 8 * 512 * 192 * 4]
    fp32 = meta(2, 8, 512, 192, dtype=FP32)
    assert taken(EFFICIENT, fp32, fp32, fp32, None, True) == []
