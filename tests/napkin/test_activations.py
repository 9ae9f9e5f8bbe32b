"""What napkin says autograd keeps, against the tensors autograd saves: equal to the byte."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.tape.attention import choose_kernel
from harness.napkin.tape.ops import sum_of_rows_bytes
from harness.simulate.kernels.gpu import Gpu, TorchRelease, capability_of
from harness.simulate.kernels.reductions import Kernel, iterator_dims, split_to_32_bit, staging_bytes
from tests.support.napkin_oracle import CONFIGS, napkin, recipe_for, saved_bytes

# The CPU keeps LayerNorm's mean and deviation in 16 bit for 16-bit inputs, CUDA in fp32, so these run in
# fp32; CUDA autocasts pow to fp32 and the CPU does not, so gelu_new (gpt2, phi) is not tried under autocast.
LAYER_NORM = ("gpt2", "gpt_neox", "phi")
WRITTEN_OUT_GELU = ("gpt2", "phi")
FAMILIES = sorted(CONFIGS)


def settings(family: str, **fields):
    # In fp32 CUDA's memory-efficient kernel returns heads by position. The CPU's returns them as the queries
    # lie, which these families then copy; under autocast (flash) CUDA does too.
    by_head = family in ("gpt_neox", "phi") and fields.get("precision") == "fp32"
    if family == "gemma2" or by_head:
        fields["attention"] = "eager"
    return fields


def check(tmp_path, family, **fields):
    recipe = recipe_for(tmp_path, family, **settings(family, **fields))
    assert napkin(recipe).sizes.kept_in_forward == saved_bytes(recipe)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path, family):
    check(tmp_path, family, precision="fp32" if family in LAYER_NORM else "bf16")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WRITTEN_OUT_GELU])
def test_every_family_under_autocast(tmp_path, family):
    check(tmp_path, family, precision="bf16-mixed")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_lora(tmp_path, family):
    check(tmp_path, family, precision="fp32" if family in LAYER_NORM else "bf16", adapter="lora")


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("phi3", "mixtral")])
def test_every_family_with_ia3(tmp_path, family):
    check(tmp_path, family, precision="fp32" if family in LAYER_NORM else "bf16", adapter="ia3")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "llama without grouped heads", "gemma2", "gpt_neox", "qwen3"])
def test_eager_attention_keeps_its_scores(tmp_path, family, rows):
    precision = "fp32" if family in LAYER_NORM else "bf16"
    check(tmp_path, family, precision=precision, attention="eager", micro_batch_size=rows)


LORA = [
    {"adapter_dtype": "base"},
    {"precision": "bf16-mixed"},
    {"lora_targets": ("q_proj", "v_proj")},
    {"lora_targets": ("q_proj", "lm_head"), "lora_rank": 3},
    {"quantization": "nf4"},
    {"quantization": "fp4", "double_quant": True, "adapter_dtype": "base"},
    {"quantization": "nf4", "precision": "fp16", "lora_rank": 4},
]


@pytest.mark.parametrize("fields", LORA, ids=str)
@pytest.mark.parametrize("family", ["llama without grouped heads", "qwen3", "phi3"])
def test_lora_in_its_variants(tmp_path, family, fields):
    if family == "phi3" and "lora_targets" in fields:
        fields = {"lora_targets": ("qkv_proj", "down_proj")}
    check(tmp_path, family, adapter="lora", **fields)


@pytest.mark.parametrize("family", ["llama without grouped heads", "qwen3", "phi3"])
def test_qlora_under_autocast_as_on_cuda(tmp_path, family, monkeypatch):
    # peft asks whether CUDA's autocast is on; here it is the CPU's
    on_cuda = SimpleNamespace(**{**vars(torch), "is_autocast_enabled": lambda: True})
    monkeypatch.setattr("peft.tuners.lora.bnb.torch", on_cuda)
    fields = {"quantization": "nf4", "precision": "bf16-mixed", "upcast_for_kbit": True}
    check(tmp_path, family, adapter="lora", **fields)


IN_ATTENTION = ("q_proj", "v_proj")
MIXTURES = [
    {"precision": "bf16-mixed"},
    {"quantization": "nf4", "lora_targets": IN_ATTENTION},
    {"adapter": "ia3", "lora_targets": IN_ATTENTION},
]


@pytest.mark.parametrize("fields", MIXTURES, ids=str)
def test_a_mixture_with_an_adapter(tmp_path, fields):
    check(tmp_path, "mixtral", **{"adapter": "lora", **fields})


REFUSED = [
    ("mixtral", {"adapter": "lora", "lora_dropout": 0.1}, "lora_dropout"),
    ("mixtral", {"adapter": "ia3"}, "w2"),
    ("phi3", {"adapter": "ia3"}, "phi3"),
    ("llama", {"adapter": "lora", "lora_targets": ("q_proj", "qproj")}, "qproj"),
    ("gemma2", {"attention": "sdpa"}, "eager"),
]


@pytest.mark.parametrize(("family", "fields", "named"), REFUSED)
def test_what_cannot_be_built_is_refused_as_the_model_refuses_it(tmp_path, family, fields, named):
    recipe = recipe_for(tmp_path, family, **fields)
    with pytest.raises(InputError, match=named):
        napkin(recipe)
    with pytest.raises(InputError):
        saved_bytes(recipe)


def test_dropout_of_lora_keeps_a_mask_of_one_byte_on_cuda(tmp_path):
    recipe = recipe_for(tmp_path, "llama", adapter="lora", lora_dropout=0.1)
    kept = [
        t
        for stage in napkin(recipe).sizes.stages.blocks
        for t in stage.kept_tensors
        if t.name.startswith("mask of")
    ]
    assert {t.dtype for t in kept} == {"bool"}
    # the CPU's mask has the dtype of what is dropped, here fp32: three bytes more an element
    first, rest = napkin(recipe).sizes.stages.blocks
    count = [sum(t.size_bytes for t in s.kept_tensors if t.name.startswith("mask of")) for s in (first, rest)]
    masks = count[0] + 2 * count[1]
    # the rotated part of the mask that the first block's frozen input does not need is kept on neither
    assert saved_bytes(recipe) - napkin(recipe).sizes.kept_in_forward == 3 * masks


def test_checkpointing_keeps_one_block_input_a_layer(tmp_path):
    recipe = recipe_for(tmp_path, "llama", gradient_checkpointing=True)
    memory = napkin(recipe)
    # batch 2 x seq 24 x hidden 64 in bf16, for each of 3 layers
    assert sum(s.kept_until_backward * s.count for s in memory.sizes.stages.blocks) == 3 * 2 * 24 * 64 * 2


def test_sdpa_without_a_fused_kernel_keeps_scores_in_fp32(tmp_path):
    recipe = recipe_for(tmp_path, "llama", precision="fp32")
    with sdpa_kernel(SDPBackend.MATH):
        saved = saved_bytes(recipe)
    # fp32 with grouped heads: CUDA's flash wants 16 bit, its memory-efficient kernel equal heads
    assert napkin(recipe).sizes.kept_in_forward == saved


@pytest.mark.parametrize(
    ("fields", "dtype", "masked", "capability", "kernel"),
    [
        ({}, "bf16", False, 8.0, "flash"),
        ({}, "bf16", False, 9.0, "cudnn"),
        ({}, "bf16", True, 8.9, "efficient"),
        ({}, "bf16", True, 10.0, "cudnn"),
        ({}, "bf16", False, 12.0, "flash"),
        ({"config": {"attention_dropout": 0.1}}, "bf16", False, 9.0, "flash"),
        ({"config": {"attention_dropout": 0.125}}, "bf16", False, 9.0, "cudnn"),
        ({"config": {"hidden_size": 1160, "head_dim": 145}}, "bf16", False, 9.0, "flash"),
        ({"config": {"head_dim": 256}}, "bf16", False, 10.0, "flash"),
        ({}, "fp32", False, 9.0, "math"),
        ({}, "fp16", False, 7.5, "math"),
        ({"config": {"num_key_value_heads": 4}}, "fp16", False, 7.5, "efficient"),
        ({"config": {"num_key_value_heads": 4}}, "fp32", False, 8.0, "efficient"),
        ({"config": {"num_key_value_heads": 4}}, "bf16", False, 7.0, "math"),
        ({"attention": "eager"}, "bf16", False, 9.0, "eager"),
        ({"attention": "flash_attention_2"}, "bf16", True, 9.0, "flash"),
    ],
)
def test_the_kernel_is_the_one_cuda_chooses(tmp_path, fields, dtype, masked, capability, kernel):
    recipe = recipe_for(tmp_path, "llama", **fields)
    built = BuiltModel(recipe, napkin(recipe).sizes.built.shape)
    assert choose_kernel(built, dtype, masked=masked, compute_capability=capability) == kernel


def test_int8_keeps_the_input_of_every_quantized_layer(tmp_path):
    fields = {"adapter": "lora", "lora_targets": ("o_proj",)}
    plain = recipe_for(tmp_path, "llama", **fields)
    int8 = plain.model_copy(update={"quantization": "int8"})
    # frozen 16-bit layers keep nothing of these; bitsandbytes keeps them for outlier columns. Inputs of
    # q, k, v (shared) and gate, up (shared): 2x24x64; of down: 2x24x112; of o: kept by attention anyway.
    # The first block's q, k, v see frozen embeddings, which need no gradient.
    rows = 2 * 24 * 2
    added = 2 * rows * 64 + 3 * rows * (64 + 112)
    assert napkin(int8).sizes.kept_in_forward - napkin(plain).sizes.kept_in_forward == added


def test_logits_and_loss_take_two_four_four_and_four_bytes_a_token_and_word(tmp_path):
    """The stock loss: 16-bit logits (2V), their fp32 copy (4V), log-probabilities (4V) in forward; and in
    backward log-probabilities, their gradient, and the gradient of the logits (4V each)."""
    recipe = recipe_for(tmp_path, "llama", config={"vocab_size": 50_000})
    words = 2 * 24 * 50_000
    largest = {s.phase: s.activations + s.temporaries for s in napkin(recipe).moments[:-1]}
    forward = [s for s in napkin(recipe).moments if s.phase == "forward"][-1]
    assert forward.activations + forward.temporaries == pytest.approx((2 + 4 + 4) * words, rel=0.03)
    assert largest["loss"] == pytest.approx((4 + 4 + 4) * words, rel=0.03)
    fused = napkin(recipe.model_copy(update={"loss": "fused_linear"})).moments[:-1]
    # chunks about as large as the hidden states, and the head's gradient made in forward
    assert max(s.activations + s.temporaries for s in fused) < 50_000 * 64 * 2 + 2**20 < largest["loss"] / 2


@pytest.mark.parametrize("name", ["h100", "a100-80gb", "rtx-4090", "t4"])
def test_a_sum_of_rows_takes_what_the_simulated_kernel_takes(name):
    """The gradient of a norm's weight or of a scale: one row, summed from as many as there are tokens."""
    device = find_hardware(name)
    gpu = Gpu(capability_of(device.datasheet.compute_capability), device.sm_count, TorchRelease(2, 13))
    found = set[int]()
    for rows in (256, 1020, 1021, 2048, 5000, 2**16, 2**20):
        for columns in (128, 256, 1000, 2048, 5632, 11008, 32768):
            values = torch.empty(rows, columns, device="meta")
            parts = split_to_32_bit(iterator_dims(values, [0], values.dtype), 4, 4)
            expected = max(staging_bytes(part, 4, Kernel(4), gpu)[0] for part in parts)
            if len(parts) == 1:
                assert sum_of_rows_bytes(rows, columns, device.gpu_threads) == expected, (rows, columns)
                found.add(expected)
    assert len(found) > 10
