"""FLOPs against sums written out by hand, and against PyTorch's own counter."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from harness.observe.flops import FlopCount, operator_flops
from tests.support.tiny import CPU, built, tiny

ROWS, INNER, OUTER = 4, 8, 16
ONE_PRODUCT = 2 * ROWS * INNER * OUTER
"""Of (4, 8) x (8, 16), either way round: 2 FLOPs a multiply-add."""


def counted(forward: Any, then: Any = lambda out: out.sum().backward()) -> FlopCount:
    count = FlopCount()
    with count.phase("forward"):
        out = forward()
    with count.phase("backward"):
        then(out)
    return count


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INNER, OUTER, bias=False), nn.Linear(OUTER, INNER, bias=False))


def test_a_layer_is_one_product_forward_and_two_backward():
    x = torch.ones(ROWS, INNER, requires_grad=True)
    count = counted(lambda: two_layers()(x))
    assert dict(count.flops) == {"forward": 2 * ONE_PRODUCT, "backward": 4 * ONE_PRODUCT}
    assert count.recomputed_flops == 0


def test_a_frozen_layer_has_no_weight_gradient():
    layers = two_layers().requires_grad_(False)
    x = torch.ones(ROWS, INNER, requires_grad=True)
    assert counted(lambda: layers(x)).flops["backward"] == 2 * ONE_PRODUCT


def test_recomputation_is_counted_apart_and_stops_early():
    """Backward needs the second layer's input, not its output: only the first layer runs again."""
    x = torch.ones(ROWS, INNER, requires_grad=True)
    layers = two_layers()
    count = counted(lambda: checkpoint(layers, x, use_reentrant=False))
    assert dict(count.flops) == {"forward": 2 * ONE_PRODUCT, "backward": 5 * ONE_PRODUCT}
    assert count.recomputed_flops == ONE_PRODUCT


BATCH, HEADS, LENGTH, WIDTH = 2, 3, 8, 16
SCORES = 2 * BATCH * HEADS * LENGTH * LENGTH * WIDTH
"""Of query times key, every pair of positions; attention times value is as many."""


@pytest.mark.parametrize(
    ("backend", "backward_products", "name"),
    [
        (SDPBackend.MATH, 4, "aten._safe_softmax"),
        # keeps no scores: it computes them again
        (SDPBackend.FLASH_ATTENTION, 5, "aten._scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_attention_and_the_name_of_its_kernel(backend, backward_products, name):
    q, k, v = (torch.randn(BATCH, HEADS, LENGTH, WIDTH, requires_grad=True) for _ in range(3))
    with sdpa_kernel(backend):
        count = counted(lambda: nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert dict(count.flops) == {"forward": 2 * SCORES, "backward": backward_products * SCORES}
    assert count.attention == {name}


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_grouped_heads_are_repeated_to_the_querys(kernel):
    """One head of keys and values for all the query's: as many products, only fewer numbers to read."""
    q, gradient = (torch.empty(BATCH, HEADS, LENGTH, WIDTH, device="meta") for _ in range(2))
    k, v = (torch.empty(BATCH, 1, LENGTH, WIDTH, device="meta") for _ in range(2))
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    assert operator_flops(forward, (q, k, v), {}, None) == 2 * SCORES
    assert operator_flops(backward, (gradient, q, k, v), {}, None) == 5 * SCORES


def test_eager_attention_is_no_attention_operator():
    q = torch.randn(BATCH, HEADS, LENGTH, WIDTH)
    assert counted(lambda: (q @ q.mT).softmax(-1) @ q, lambda out: None).attention == set()


def test_the_products_of_an_int8_base():
    pytest.importorskip("bitsandbytes")
    left, right = (torch.ones(shape, dtype=torch.int8) for shape in ((2, 3, INNER), (OUTER, INNER)))
    with FlopCount() as count:
        torch.ops.bitsandbytes.int8_linear_matmul(left, right)
    assert sum(count.flops.values()) == 2 * 6 * INNER * OUTER


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_a_quantized_layer_counts_as_the_layer_it_stands_for(quantization: str):
    """The same rows by the same weight, forward; bitsandbytes' operators take the weight in other shapes."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = (
        bitsandbytes.nn.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False)
        if quantization == "int8"
        else bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.bfloat16)
    ).to("cpu")
    rows = torch.randn(2, 24, 64, dtype=torch.bfloat16)
    with torch.no_grad(), FlopCount() as count:
        layer(rows)
    assert sum(count.flops.values()) == 2 * (2 * 24) * 64 * 128


def test_the_products_of_experts():
    """Every row meets the matrix of its own expert, one of three."""
    rows, experts = torch.ones(ROWS, INNER, dtype=torch.bfloat16), torch.ones(3, INNER, OUTER).bfloat16()
    ends = torch.tensor([1, 2, ROWS], dtype=torch.int32)
    with FlopCount() as count:
        torch._grouped_mm(rows, experts, offs=ends)
    assert sum(count.flops.values()) == ONE_PRODUCT


def test_elementwise_operators_count_nothing():
    ones = torch.ones(3)
    assert operator_flops(torch.ops.aten.add.Tensor, (ones, ones), {}, ones) == 0


def test_a_whole_step_agrees_with_pytorchs_counter():
    """With eager attention, where both know every operator."""
    training, batches = built(tiny(attention="eager"))
    (batch,), num_tokens = next(batches)

    def forward() -> Any:
        return training.model(**batch, num_items_in_batch=num_tokens).loss

    ours = counted(forward, lambda loss: loss.backward())
    with FlopCounterMode(display=False) as theirs:
        forward().backward()
    assert sum(ours.flops.values()) == theirs.get_total_flops() > 0


def test_it_observes_the_loops_steps():
    from harness.training.loop import run_steps

    training, batches = built(tiny())
    count = FlopCount()
    list(run_steps(training, batches, CPU, ["warmup"], count))
    assert count.flops["forward"] > 0
    assert set(count.flops) == {"forward", "backward"}


def test_a_product_that_names_its_dtype_counts_like_any_other():
    """mm(a, b, out_dtype) and addmm(c, a, b, out_dtype), as Liger adds up a gradient in fp32."""
    a, b, c = torch.empty(2, 3, device="meta"), torch.empty(3, 5, device="meta"), torch.empty(2, 5)
    ops = torch.ops.aten
    assert operator_flops(ops.mm.dtype, (a, b, torch.float32), {}, c) == 2 * 2 * 3 * 5
    assert operator_flops(ops.addmm.dtype_out, (c, a, b, torch.float32), {"out": c}, c) == 2 * 2 * 3 * 5


FLASH_ATTN = torch.library.Library("flash_attn", "DEF")
"""The package's operators with the arguments that its interface gives them; it is not installed here."""
REST = "float dropout_p, float softmax_scale, bool causal, int window_size_left, int window_size_right"
GIVEN = "Tensor q, Tensor k, Tensor v"
STARTS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
OF_BACKWARD = f"Tensor dout, {GIVEN}, Tensor out, Tensor softmax_lse, Tensor? dq, Tensor? dk, Tensor? dv"
for name, arguments in {
    "_flash_attn_forward": GIVEN,
    "_flash_attn_varlen_forward": f"{GIVEN}, {STARTS}",
    "_flash_attn_backward": OF_BACKWARD,
    "_flash_attn_varlen_backward": f"{OF_BACKWARD}, {STARTS}",
}.items():
    FLASH_ATTN.define(f"{name}({arguments}, {REST}) -> Tensor")


def flash_attn(name: str, *tensors: Any, window: int = -1) -> int:
    func = getattr(torch.ops.flash_attn, name).default
    named = {"causal": True, "window_size_left": window, "window_size_right": 0}
    return operator_flops(func, (*tensors, 0.0, 1.0), named, None)


def test_the_flash_attn_packages_operators():
    """As torch counts its own attention; documents of 100, 60 and 96 tokens are three sequences."""
    q, k = torch.empty(2, 256, 8, 64), torch.empty(2, 256, 2, 64)
    of_torch = 4 * 2 * 8 * 256 * 256 * 64
    assert flash_attn("_flash_attn_forward", q, k, k) == of_torch
    backward = (q, q, k, k, q, q, None, None, None)
    assert flash_attn("_flash_attn_backward", *backward) == of_torch * 5 // 2
    starts = torch.tensor([0, 100, 160, 256], dtype=torch.int32)
    documents = (starts, starts, 100, 100)
    of_documents = 4 * 8 * 64 * (100**2 + 60**2 + 96**2)
    q, k = q[0], k[0]
    assert flash_attn("_flash_attn_varlen_forward", q, k, k, *documents) == of_documents
    backward = (q, q, k, k, q, q, None, None, None, *documents)
    assert flash_attn("_flash_attn_varlen_backward", *backward) == of_documents * 5 // 2


def test_a_window_of_the_flash_attn_package():
    """1,024 keys of 8,192: of the whole square somewhat less than a quarter."""
    q = torch.empty(1, 8192, 1, 64)
    seen = flash_attn("_flash_attn_forward", q, q, q, window=1023) / flash_attn(
        "_flash_attn_forward", q, q, q
    )
    keys = (torch.arange(8192) + 1).clamp(max=1024).sum().item()
    assert 2 * keys / 8192**2 < seen < 2 * keys / 8192**2 + 128 / 8192


CONVOLUTIONS = {
    "plain": (nn.Conv2d, {}, 1),
    "strides": (nn.Conv2d, {"stride": 2, "padding": 1}, 1),
    "transposed": (nn.ConvTranspose2d, {"stride": 2}, 1),
    "groups": (nn.Conv2d, {"groups": 4}, 4),
    "transposed groups": (nn.ConvTranspose2d, {"groups": 4}, 4),
}


@pytest.mark.parametrize("name", sorted(CONVOLUTIONS))
def test_a_convolution_meets_each_filter_at_each_position(name: str):
    """PyTorch's own counter agrees, but for filters in groups, whose gradient it counts once a group."""
    kind, options, groups = CONVOLUTIONS[name]
    layer, images = kind(16, 32, 3, **options), torch.ones(2, 16, 20, 20, requires_grad=True)
    count = counted(lambda: layer(images))
    smaller = images if kind is nn.ConvTranspose2d else layer(images)
    once = 2 * 2 * smaller.shape[2] * smaller.shape[3] * 16 * 32 * 9 // groups
    assert dict(count.flops) == {"forward": once, "backward": 2 * once}
    if groups == 1:
        with FlopCounterMode(display=False) as theirs:
            layer(images).sum().backward()
        assert sum(count.flops.values()) == theirs.get_total_flops()
