"""flash-attn's kernels on shape-only tensors. What they take is held by recordings of the package itself
(tests/simulate/test_recorded_traces.py: random-8 to random-10); here is what no recording has.

Sources: github.com/Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp (version 2: mha_bwd) and
hopper/flash_api.cpp (version 3: mha_bwd), flash_attn/cute/interface.py (version 4).
"""

import json
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from harness.hardware.hardware import find_hardware
from harness.kernels import Gpu, script_of
from harness.kernels.flash_attention import blocks_3
from harness.kernels.script import Take
from harness.simulate.cuda.flash_attn_package import flash_attention
from harness.simulate.simulated_run import simulate
from harness.system import TorchRelease
from tests.support.tiny import tiny

H100 = Gpu((9, 0), 132, TorchRelease(2, 13))
A100 = Gpu((8, 0), 108, TorchRelease(2, 13))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def test_a_head_dim_that_is_no_multiple_of_8_is_padded() -> None:
    q, saved = meta(1, 128, 4, 20, requires_grad=True), list[tuple[int, ...]]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        out = flash_attention(2).func(q, q, q)
    assert saved[:4] == [(1, 128, 4, 24)] * 4
    assert out.shape == (1, 128, 4, 20)
    assert torch.autograd.grad(out, q, torch.empty_like(out))[0].shape == (1, 128, 4, 20)


def test_deterministic_backward_of_version_2() -> None:
    """nsplits = 132 / (2 * 8), rounded up: 9 copies of dq_accum on an H100, 7 on an A100."""
    q = meta(2, 256, 8, 64)
    how = {"causal": True, "local": False, "capped": False, "deterministic": True, "version": 2}
    for gpu, copies in ((H100, 9), (A100, 7)):
        args = (*[q] * 9, None, 256, 256, *how.values())
        steps = script_of(torch.ops.harness.flash_attention_backward.default, args, {}, None, gpu)
        taken = [step.size_bytes for step in steps if isinstance(step, Take)]
        assert taken[1] == copies * 2 * 256 * 8 * 64 * 4


# (head dim, causal, local, capped, GPU): (width, kBlockM, kBlockN) as mha_bwd's tables have them
BLOCKS = {
    (64, True, False, False, H100): (64, 128, 128),
    (64, True, False, True, H100): (64, 96, 128),
    (80, True, False, False, H100): (96, 64, 128),
    (128, False, False, False, H100): (128, 80, 128),
    (128, True, False, False, H100): (128, 64, 128),
    (128, True, True, False, H100): (128, 64, 128),
    (192, True, False, False, H100): (192, 64, 96),
    (256, True, False, False, H100): (256, 64, 80),
    (128, False, False, False, A100): (128, 64, 128),
    (192, False, False, False, A100): (192, 64, 80),
    (256, False, False, False, Gpu((8, 9), 128, TorchRelease(2, 13))): (256, 32, 64),
}


@pytest.mark.parametrize(("given", "expected"), BLOCKS.items())
def test_blocks_of_version_3(given: tuple[Any, ...], expected: tuple[int, int, int]) -> None:
    head_dim, causal, local, capped, gpu = given
    assert blocks_3(head_dim, causal, local, capped, gpu) == expected


def taken_by_version_4(
    gpu: Gpu, heads: int, groups: int, head_dim: int, starts: Tensor | None = None, **how: bool
) -> list[int]:
    """What backward takes for 2 rows of 300 tokens, or for 600 tokens of the documents in `starts`."""
    lead = (2, 300) if starts is None else (600,)
    q, k = meta(*lead, heads, head_dim), meta(*lead, groups, head_dim)
    settings = {"causal": True, "local": False, "capped": False, "deterministic": False, **how}
    args = (q, q, k, k, q, q, q, k, k, starts, 300, 300, *settings.values(), 4)
    steps = script_of(torch.ops.harness.flash_attention_backward.default, args, {}, None, gpu)
    return [step.size_bytes for step in steps if isinstance(step, Take)]


def test_backward_of_version_4() -> None:
    """By hand, after _flash_attn_bwd in interface.py: dq_accum, dpsum, lse_log2, dk_accum, dv_accum."""
    h100, b200, consumer = (Gpu(of, 132, TorchRelease(2, 13)) for of in ((9, 0), (10, 0), (12, 0)))
    # rows of 64, 80 or 128 and columns of 128: 300 tokens are 320, 320 or 384 rows, and 384 columns
    assert taken_by_version_4(h100, 8, 8, 128) == [4 * 2 * 8 * 320 * 128, *2 * [4 * 2 * 8 * 320]]
    assert taken_by_version_4(h100, 8, 8, 128, causal=False)[0] == 4 * 2 * 8 * 320 * 128
    assert taken_by_version_4(h100, 8, 8, 64)[0] == 4 * 2 * 8 * 384 * 64
    assert taken_by_version_4(h100, 8, 2, 64)[3:] == 2 * [4 * 2 * 2 * 384 * 64]
    # two blocks of columns together: 512
    assert taken_by_version_4(b200, 8, 2, 128)[3:] == 2 * [4 * 2 * 2 * 512 * 128]
    assert taken_by_version_4(b200, 8, 2, 64)[3:] == 2 * [4 * 2 * 2 * 384 * 64]
    assert taken_by_version_4(b200, 8, 2, 256) == 2 * [4 * 2 * 8 * 384]
    # dQ_semaphore: 3 blocks of rows, 2 together; dK_semaphore and dV_semaphore: 4 of columns, 2 numbers each
    semaphores = taken_by_version_4(b200, 8, 2, 128, deterministic=True)[5:]
    assert semaphores == [4 * 2 * 8 * 3 * 2, *2 * [4 * 2 * 2 * 4 * 2]]
    # (600 + 4 * 64 - 1) // 64 * 64 rows of 3 documents
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    assert taken_by_version_4(consumer, 8, 8, 128, starts)[1] == 4 * 8 * 832


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flops_are_those_of_torchs_own_kernel(version: int) -> None:
    """2 products forward and 5 backward, as PyTorch's counter counts its flash kernel."""

    def counted(attention: Any, *shape: int) -> int:
        q = meta(*shape, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            attention(q).sum().backward()
        return counter.get_total_flops()

    def torchs(q: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)[0]

    ours = counted(lambda q: flash_attention(version).func(q, q, q, causal=True), 2, 128, 4, 64)
    assert ours == counted(torchs, 2, 4, 128, 64) == (2 + 5) * 2 * (2 * 4 * 128 * 128 * 64)


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("fields", [{}, {"packing": True, "micro_batch_size": 1}, {"micro_batch_size": 1}])
def test_a_recipe_with_flash_attention_simulates(version: int, fields: dict[str, Any]) -> None:
    """The package need not be here, none is imported, and transformers forgets it afterwards."""
    from transformers import modeling_flash_attention_utils as utils

    before = utils._loaded_implementation, utils._lazy_imports
    recipe = tiny(attention=f"flash_attention_{version}", precision="bf16", seq_len=128, **fields)
    profile, memory = simulate(recipe, find_hardware("h100"))
    assert profile.provenance["attention_kernels"] == [f"flash_attention_{version}"]
    assert (utils._loaded_implementation, utils._lazy_imports) == before
    assert not {"flash_attn", "flash_attn_interface"} & sys.modules.keys()
    again = simulate(recipe, find_hardware("h100"))[0]
    assert json.loads(again.to_json())["memory"] == json.loads(profile.to_json())["memory"]
    # both blocks keep a log-sum-exp: 4 heads of 128 tokens in fp32, for each row of the micro batch
    sums_bytes = 4 * 4 * 128 * recipe.micro_batch_size
    kept = [
        span.module
        for span in memory.spans
        if span.size_bytes == sums_bytes and (span.birth_phase, span.death_phase) == ("forward", "backward")
    ]
    assert [module for module in kept if module and module.endswith("self_attn")] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
