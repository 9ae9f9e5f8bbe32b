"""Masks as indices on CUDA. Sizes are those that PyTorch's CUDA host code (2.13, CUDA 13.0) asked its
allocator for, on virtual GPUs: `m.nonzero()`, `x.masked_scatter_(m, s)` and backward of `x[m]`, of masks that
are true."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.kernels import Gpu, script_of
from harness.system import TorchRelease
from tests.kernels.test_rules import A100, H100, L4, written

aten = torch.ops.aten
B200 = Gpu((10, 0), 148, TorchRelease(2, 13))
T4 = Gpu((7, 5), 40, TorchRelease(2, 13))
LARGE = 20_000_000
# GPU, elements of the mask, what counts them, what selects their positions
ASKED = [
    (H100, 1016, 1, 1023),
    (H100, 5000, 21503, 1023),
    (H100, 300_000, 21503, 1535),
    (H100, 1_000_003, 21503, 2815),
    (H100, LARGE, 21503, 38655),
    (A100, 4097, 17663, 1023),
    (A100, LARGE, 17663, 70399),
    (L4, LARGE, 7423, 250879),
    (T4, LARGE, 3583, 250879),
    (B200, LARGE, 24063, 46335),
]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def script(func: Any, *args: Any, out: Tensor, gpu: Gpu = H100) -> str:
    return written(script_of(func, args, {}, out, gpu))


@pytest.mark.parametrize(("gpu", "count", "counting", "selecting"), ASKED)
def test_a_mask_becomes_positions(gpu: Gpu, count: int, counting: int, selecting: int) -> None:
    mask = meta(1, count, dtype=torch.bool)
    expected = f"+4 +{counting} -1 +{16 * count} +{selecting} -3 -0 =0 -2"
    assert script(aten.index.Tensor, meta(1, count), [mask], out=meta(count), gpu=gpu) == expected
    backward = aten.masked_scatter_backward.default
    assert script(backward, meta(1, count), mask, [count], out=meta(count), gpu=gpu) == expected


def test_gradients_of_selected_rows_are_sorted_back() -> None:
    """Recorded on a virtual H100: backward of x[m], of a mask of (8, 127) rows, in a step of task: dpo."""
    mask, rows = meta(8, 127, dtype=torch.bool), 8 * 127 * 8
    zeros = meta(8, 127, 256)
    found = script(aten._index_put_impl_.default, zeros, [mask], meta(1016, 256), True, True, out=zeros)
    columns = f"+4 +1 -1 +{2 * rows} +1023 -3 -0"
    linear = f"+{rows} +{rows} -4 +{rows} +{rows} -6 -7 -2"
    assert found == f"{columns} {linear} +{rows} +{rows} +{rows} +1 -11 -10 -9 -8 -5"


@pytest.mark.parametrize("gradients", [True, False])
def test_cudnn_makes_no_log_sum_exp_that_nobody_needs(gradients: bool) -> None:
    """native/transformers/cuda/attention.cu: as `compute_logsumexp` says."""
    from harness.kernels.operators import operator_of

    func = aten._scaled_dot_product_cudnn_attention.default
    result: Callable[..., Any] | None = operator_of(func).result
    assert result is not None
    given = [meta(2, 4, 16, 64, dtype=torch.bfloat16) for _ in range(3)]
    found = result(func, (*given, None, gradients, 0.0, True), {})
    if gradients:
        assert found is NotImplemented
    else:
        assert [found[0].shape, found[1].numel()] == [given[0].shape, 0]
