"""FLOPs by phase against PyTorch's own count of a real step, and seconds against the device's ceilings."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version

from harness.hardware.hardware import find_hardware
from harness.hardware.roofline import Work
from harness.napkin.memory.optimizer import step_work
from harness.napkin.model.weights import Weight
from harness.napkin.prediction import predict
from harness.napkin.timing import Timing
from harness.observe.flops import FlopCount
from harness.simulate.simulated_run import simulate
from harness.system import TorchRelease
from harness.training.model import build_training
from harness.training.step import train_step
from tests.support.napkin_oracle import napkin, recipe_for
from tests.support.releases import ANGLES_BY_PRODUCT
from tests.support.tiny import tiny

FAMILIES = ("llama", "gpt2", "gpt_neox", "gemma2", "mixtral", "phi", "phi3", "qwen3")


def without_rotary_angles(model, count):
    """Leave out of `count` the products position x frequency: transformers before 5.19 has them as a matrix
    product, later ones (as napkin) as an elementwise one."""
    before = []
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_pre_hook(lambda *_: before.append(count.flops["forward"]))
            module.register_forward_hook(lambda *_: count.flops.update(forward=before.pop()))


def check(tmp_path, family, **fields):
    """Forward's, backward's and the recomputed FLOPs of napkin are those of the operators that ran."""
    if family == "gemma2":
        fields["attention"] = "eager"
    recipe = recipe_for(tmp_path, family, **fields)
    ids = torch.randint(0, 300, (recipe.micro_batch_size, recipe.seq_len))
    batches = [{"input_ids": ids, "labels": ids.clone()} for _ in range(recipe.gradient_accumulation_steps)]
    count = FlopCount()
    training = build_training(recipe, torch.device("cpu"))
    without_rotary_angles(training.model, count)
    train_step(training, batches, torch.tensor(10.0), count)
    timing = Timing(napkin(recipe).sizes)
    phases = timing.phases
    assert phases["forward"].flops == count.flops["forward"]
    assert phases["backward"].flops == count.flops["backward"]
    assert phases["backward"].recomputed_flops == count.recomputed_flops
    total = count.flops["forward"] + count.flops["backward"]
    assert (timing.hardware_flops, timing.model_flops) == (total, total - count.recomputed_flops)


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_of_every_kind_of_block(tmp_path, family):
    check(tmp_path, family)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_flops_stop_where_checkpointing_stops(tmp_path, family, adapter):
    if (family, adapter) == ("mixtral", "lora"):
        pytest.skip("its adapters are on bare parameters: products of weights, which the CPU counts apart")
    check(tmp_path, family, gradient_checkpointing=True, adapter=adapter)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-mixed", "gradient_accumulation_steps": 2},
        {"attention": "eager"},
        {"adapter": "lora", "lora_targets": ("q_proj", "lm_head"), "lora_rank": 3},
        {"adapter": "ia3", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_flops_of_toggles(tmp_path, fields):
    check(tmp_path, "llama", **fields)


def test_a_step_that_waits_for_its_operators_to_be_launched_is_host_bound(tmp_path):
    timing = Timing(napkin(recipe_for(tmp_path, "llama")).sizes)
    assert timing.bound == "host"
    launches = sum(work.operators for work in timing.works)
    assert timing.seconds >= launches * timing.hardware.calibration.host_op_s
    compiled = Timing(napkin(recipe_for(tmp_path, "llama", compile=True)).sizes)
    assert compiled.seconds < timing.seconds


def test_offloaded_activations_leave_once_and_come_back_for_each_that_reads_them(tmp_path):
    recipe = recipe_for(tmp_path, "llama", offload=["activations"])
    timing = Timing(napkin(recipe).sizes)
    out, back = (timing.phases[name].transfer_bytes for name in ("forward", "backward"))
    assert out == timing.sizes.kept_in_forward
    block = timing.sizes.stages.blocks[-1]
    [normed] = [t for t in block.kept_tensors if t.name == "norm 2"]
    assert sum(normed in op.saved for op in block.tape.ops) == 2, "gate and up"
    assert back > out + block.count * normed.size_bytes


def link_bytes(time_s: float, device) -> float:
    return time_s * device.datasheet.host_link.value * device.calibration.host_link_fraction


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_the_loss_keeps_crosses_the_link_while_nothing_is_computed(tmp_path, checkpointing):
    """The log-probabilities leave when forward is over, come for the loss and once more for the softmax."""
    fields = {"config": WIDE | {"vocab_size": 65_536}, "micro_batch_size": 4, "seq_len": 2048}
    fields["gradient_checkpointing"] = checkpointing
    device = find_hardware("h100")
    step = {}
    for offload in ([], ["activations"]):
        recipe = recipe_for(tmp_path, "llama", offload=offload, **fields)
        guess, (found, _) = predict(recipe, device), simulate(recipe, device)
        step[bool(offload)] = guess.step.time_s.median
        assert guess.step.time_s.median == pytest.approx(found.step.time_s.median, rel=0.1)
        assert guess.step.bound == found.step.bound
    logits = 4 * 2048 * 65_536 * 4
    assert link_bytes(step[True] - step[False], device) > 2 * logits


before_2_15 = pytest.mark.skipif(
    TorchRelease.of(torch.__version__) >= (2, 15),
    reason="since PyTorch 2.15 grouped heads in fp32 have a fused kernel; napkin prices plain attention",
)
since_5_18 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="transformers 5.17 passes three times more over the rows of experts, to mask those of other ranks "
    "that are not there; napkin counts the bytes of later releases",
)
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
BF16 = WIDE | {"dtype": "bfloat16"}
"""What is frozen is in the dtype of its config."""


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapter": "lora"},
        {"adapter": "lora", "gradient_checkpointing": True},
        {"adapter": "lora", "quantization": "nf4"},
        {"precision": "bf16-mixed"},
        pytest.param({"precision": "fp32"}, marks=before_2_15),
        {"attention": "eager"},
        {"optimizer_in_backward": True},
        {"gradient_accumulation_steps": 3},
        {"optimizer": "adafactor"},
        {"optimizer": "sgd"},
        {"adapter": "lora", "quantization": "int8"},
        {"adapter": "lora", "quantization": "int8", "precision": "fp16"},
        {"adapter": "lora", "quantization": "int8", "gradient_checkpointing": True},
        pytest.param({"family": "mixtral", "precision": "bf16-mixed"}, marks=since_5_18),
        pytest.param(
            {"family": "mixtral", "precision": "bf16-mixed", "adapter": "lora", "config": BF16},
            marks=since_5_18,
        ),
        pytest.param(
            {"family": "mixtral", "precision": "bf16-mixed", "adapter": "lora", "quantization": "nf4"},
            marks=since_5_18,
        ),
        pytest.param(
            {"family": "mixtral", "adapter": "lora", "gradient_checkpointing": True}, marks=since_5_18
        ),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_operators_that_run(tmp_path, fields):
    """Napkin knows formulas, the simulation the operators: what each reads and writes, phase by phase. Both
    count the FLOPs of forward and backward alike, but for the angles of the rotary embedding: a product of
    half a head's 64 dimensions with the positions."""
    device = find_hardware("h100")
    fields = {"family": "llama", "config": WIDE, "micro_batch_size": 4, "seq_len": 512, **fields}
    recipe = recipe_for(tmp_path, **fields)
    guess, (found, _) = predict(recipe, device), simulate(recipe, device)
    angles = 2 * 32 * recipe.seq_len * recipe.gradient_accumulation_steps if ANGLES_BY_PRODUCT else 0
    forward_flops = guess.phases["forward"].flops
    assert forward_flops is not None
    assert forward_flops + angles == found.phases["forward"].flops
    assert guess.phases["backward"].flops == found.phases["backward"].flops
    for phase, tolerance in (("forward", 0.03), ("backward", 0.06), ("optimizer_step", 0.03)):
        moved = [answer.phases[phase].bytes_moved for answer in (guess, found)]
        assert moved[0] == pytest.approx(moved[1], rel=tolerance, abs=2e6), phase


@pytest.mark.parametrize(
    "fields",
    [{}, {"optimizer_impl": "for_loop"}, {"optimizer_impl": "fused"}, {"optimizer": "adamw_8bit"}],
    ids=str,
)
def test_an_optimizer_step_waits_for_memory_or_for_its_launches(tmp_path, fields):
    """One operator a tensor and line, or one for dozens of tensors: the same bytes, and more than twice the
    time."""
    recipe = recipe_for(tmp_path, "llama", config=WIDE, **fields)
    device = find_hardware("h100")
    answers = predict(recipe, device), simulate(recipe, device)[0]
    guess, found = (answer.phases["optimizer_step"].time_s.median for answer in answers)
    assert guess == pytest.approx(found, rel=0.15)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_on_the_host_is_done_by_the_host_all_of_it(tmp_path, optimizer, max_grad_norm):
    """Clipping too: the gradients are there when their norm is asked for."""
    device = find_hardware("h100")
    fields = {"optimizer": optimizer, "max_grad_norm": max_grad_norm, "offload": ["optimizer"]}
    recipe = recipe_for(tmp_path, "llama", config=WIDE, **fields)
    guess, (found, _) = predict(recipe, device), simulate(recipe, device)
    times = [answer.phases["optimizer_step"].time_s.median for answer in (guess, found)]
    assert times[0] == pytest.approx(times[1], rel=0.03)
    copied = Timing(napkin(recipe).sizes).phases["optimizer_step"].transfer_bytes
    assert found.phases["optimizer_step"].bytes_moved == pytest.approx(copied, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "passes", "launches"),
    [
        # torch/optim/adam.py: moments 3 + 2 + 3, the update 2 + 2 + 2 + 4; eight operators for each tensor
        ({"optimizer_impl": "for_loop"}, 18, 40 * 8),
        ({"optimizer_impl": "for_loop", "weight_decay": 0.1}, 20, 40 * 8),
        ({}, 18, 40 * 8 / 32),  # of multi-tensor kernels
        ({"optimizer": "sgd", "optimizer_impl": "for_loop"}, 3, 40),
        (
            {"optimizer": "adafactor", "optimizer_impl": "for_loop"},
            1 + 1 + 1 + 1 + 1 + 2 + 2 + 2 + 3 + 2 + 3,
            480,
        ),
        # one kernel reads the weight, its gradient and two moments of a byte, and writes all but the gradient
        ({"optimizer": "adamw_8bit"}, 3 + 2 * (2 * (1 + 4 / 256)) / 4, 40),
    ],
    ids=str,
)
def test_what_an_update_moves_by_hand(fields, passes, launches):
    """Forty matrices of 64 by 256 in fp32."""
    weight = Weight("w", 64, 256, "fp32", 64 * 256 * 4, True, count=40)
    (work,) = step_work(tiny(max_grad_norm=None, **fields), [weight])
    assert work == Work(0, 40 * 64 * 256 * 4 * passes, launches)


def test_an_unquantized_model_has_nothing_to_quantize_in_setup(tmp_path):
    assert napkin(recipe_for(tmp_path, "llama")).sizes.quantizing_bytes == 0
    nf4 = napkin(recipe_for(tmp_path, "llama", quantization="nf4", adapter="lora"))
    assert nf4.sizes.quantizing_bytes == 64 * 112 * 2  # an MLP's matrix in bf16
