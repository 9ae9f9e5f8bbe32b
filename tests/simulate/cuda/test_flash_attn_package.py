"""flash-attn's kernels on shape-only tensors: each expected size is worked out from the package's own C++.

Sources: github.com/Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp (version 2: mha_fwd,
set_params_splitkv, mha_bwd, mha_varlen_bwd) and hopper/flash_api.cpp (version 3: mha_fwd, mha_bwd).
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
from harness.kernels.script import Script, Take
from harness.simulate.cuda.flash_attn_package import flash_attention
from harness.simulate.simulated_run import simulate
from harness.system import TorchRelease
from tests.support.tiny import tiny

H100 = Gpu((9, 0), 132, TorchRelease(2, 13))
A100 = Gpu((8, 0), 108, TorchRelease(2, 13))
operators = torch.ops.harness


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


def documents(count: int) -> Tensor:
    return meta(count + 1, dtype=torch.int32)


def forward(version: int, q: Tensor, k: Tensor, gpu: Gpu = H100, **how: Any) -> list[int]:
    given: dict[str, Any] = {"starts": None, "longest": k.shape[1], "dropout_p": 0.0, "causal": True}
    given |= {"local": False, "version": version, **how}
    args = (q, k, k, *given.values())
    out = operators.flash_attention(*args)
    steps = script_of(operators.flash_attention.default, args, {}, out, gpu)
    return [step.size_bytes for step in steps if isinstance(step, Take)]


def backward(version: int, q: Tensor, k: Tensor, gpu: Gpu = H100, **how: Any) -> list[int]:
    given: dict[str, Any] = {"starts": None, "longest": k.shape[1], "causal": True, "local": False}
    given |= {"capped": False, "deterministic": False, "version": version, **how}
    args = (q, q, k, k, q, q, q, k, k, *given.values())
    steps = script_of(operators.flash_attention_backward.default, args, {}, None, gpu)
    return [step.size_bytes for step in steps if isinstance(step, Take)]


def saved_by(version: int, *tensors: Tensor, **how: Any) -> list[tuple[Any, ...]]:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((tuple(t.shape), t.dtype)) or t, lambda t: t
    ):
        flash_attention(version).func(*tensors, causal=True, **how)
    return saved


@pytest.mark.parametrize("version", [2, 3])
def test_what_is_saved_for_backward(version: int) -> None:
    """q, k, v, the output, softmax_lse {batch, heads, seqlen_q} in fp32; version 2: rng_state, 2 int64."""
    q, k = meta(2, 100, 8, 64, requires_grad=True), meta(2, 100, 4, 64, requires_grad=True)
    bf16, state = torch.bfloat16, [((2,), torch.int64)] if version == 2 else []
    assert saved_by(version, q, k, k) == [
        ((2, 100, 8, 64), bf16),
        ((2, 100, 4, 64), bf16),
        ((2, 100, 4, 64), bf16),
        ((2, 100, 8, 64), bf16),
        ((2, 8, 100), torch.float32),
        *state,
    ]


def test_of_documents_end_to_end_the_sums_are_heads_by_tokens() -> None:
    q = meta(700, 8, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        out = flash_attention(2).varlen_func(q, q, q, documents(3), documents(3), 400, 400, causal=True)
    assert out.shape == (700, 8, 64)
    assert saved == [(700, 8, 64)] * 4 + [(8, 700), (4,), (2,)]


def test_a_head_dim_that_is_no_multiple_of_8_is_padded() -> None:
    q = meta(1, 128, 4, 20, requires_grad=True)
    assert [shape for shape, _ in saved_by(2, q, q, q)][:4] == [(1, 128, 4, 24)] * 4
    out = flash_attention(2).func(q, q, q)
    assert out.shape == (1, 128, 4, 20)
    assert torch.autograd.grad(out, q, torch.empty_like(out))[0].shape == (1, 128, 4, 20)


def test_version_2_splits_the_keys_of_few_heads() -> None:
    """1 x 4 heads x 1024/64 rows = 64 blocks on 2 x 132 slots. 4 blocks of 256 keys allow 1, 2 or 4 splits,
    of efficiency 0.24, 0.48 and 0.97: four. softmax_lse_accum {4, 1, 4, 1024}, out_accum with 64 more.
    """
    q = meta(1, 1024, 4, 64)
    found = forward(2, q, q)
    assert found == [4 * 4 * 1024 * 4, 4 * 4 * 1024 * 64 * 4]
    assert forward(2, q, q, dropout_p=0.1) == []  # not implemented for dropout
    many = meta(8, 1024, 8, 64)  # 1024 blocks: enough
    assert forward(2, many, many) == []


def test_version_3_has_counters_of_its_tile_scheduler() -> None:
    """metadata_size ints. A causal batch of 5: vectors of 8 to sort and to swizzle, and the semaphore. Three
    documents: two more vectors, of 4. Nothing masked and one length: none on Hopper.
    """
    q = meta(5, 256, 8, 128)
    assert forward(3, q, q) == [4 * (2 * 8 + 1)]
    assert forward(3, q, q, local=True) == [4 * (1 * 8 + 1)]
    assert forward(3, q, q, causal=False) == []
    tokens = meta(1000, 8, 128)
    assert forward(3, tokens, tokens, starts=documents(3), longest=500) == [4 * (4 * 4 + 1)]


def test_backward_of_version_2() -> None:
    """softmax_d {2, 8, 384} and dq_accum {2, 384, 8, 96} fp32: 300 rows rounded to 384, head dim 72 to 96."""
    q = meta(2, 300, 8, 72)
    assert backward(2, q, q) == [2 * 8 * 384 * 4, 2 * 384 * 8 * 96 * 4]


def test_backward_of_version_2_with_grouped_heads() -> None:
    """dk_expanded and dv_expanded {2, 256, 32, 128} in the inputs' dtype."""
    q, k = meta(2, 256, 32, 128), meta(2, 256, 8, 128)
    assert backward(2, q, k)[2:] == [2 * 256 * 32 * 128 * 2] * 2


def test_deterministic_backward_of_version_2() -> None:
    """nsplits = 132 / (2 * 8), rounded up: 9 copies of dq_accum on an H100, 7 on an A100."""
    q = meta(2, 256, 8, 64)
    one = 2 * 256 * 8 * 64 * 4
    assert backward(2, q, q, deterministic=True)[1] == 9 * one
    assert backward(2, q, q, A100, deterministic=True)[1] == 7 * one


def test_backward_of_version_2_over_documents() -> None:
    """softmax_d {8, 1000 + 128 * 3}, dq_accum {1384, 8, 64}."""
    q = meta(1000, 8, 64)
    assert backward(2, q, q, starts=documents(3), longest=500) == [8 * 1384 * 4, 1384 * 8 * 64 * 4]


def test_backward_of_version_3() -> None:
    """Head dim 128, causal: blocks of 64 rows and 128 columns. softmax_d and softmax_lse_log2 {2, 32, 320},
    dq_accum {2, 32, 320 * 128}, dk_accum and dv_accum {2, 8, 384 * 128}, dq_semaphore {5, 2, 32}.
    """
    q, k = meta(2, 300, 32, 128), meta(2, 300, 8, 128)
    sums = 2 * 32 * 320 * 4
    grouped = 2 * 8 * 384 * 128 * 4
    assert backward(3, q, k) == [sums, sums, sums * 128, grouped, grouped, 5 * 2 * 32 * 4]


def test_backward_of_version_3_over_documents() -> None:
    """Blocks of 64 rows: 1000 + 3 * 64 = 1192 rounded up to 1216. The longest has 500: 8 blocks."""
    q = meta(1000, 8, 128)
    sums = 8 * 1216 * 4
    assert backward(3, q, q, starts=documents(3), longest=500) == [sums, sums, sums * 128, 8 * 3 * 8 * 4]


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


def test_nothing_is_taken_for_a_size_of_zero() -> None:
    script = Script()
    script.briefly(0)
    assert script.steps == []


@pytest.mark.parametrize("version", [2, 3])
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


@pytest.mark.parametrize("version", [2, 3])
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
