"""The clock of a simulated GPU against times worked out by hand, on a device with round numbers."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.allocator import Settings
from harness.architecture import load_shape
from harness.hardware.hardware import Calibration, Hardware, find_hardware
from harness.kernel_time import host_times, slow_host
from harness.kernel_time.parameters import FILE
from harness.kernels.cost import operator_bytes
from harness.kernels.script import Free, Take
from harness.recipe.check import check_recipe
from harness.simulate.clock import Cost, SimulatedTime
from harness.simulate.cuda.behaviour import cuda_behaviour
from harness.simulate.simulated_run import SimulatedRun, simulate
from tests.support.tiny import tiny

aten = torch.ops.aten
FLOPS, BANDWIDTH, HOST_OP_S = 1e12, 1e9, 1e-6
"""Of the device below: 1 TFLOP/s in 16 bit, half in attention, 1 GB/s, 1 us of the host in the mean."""
LINK, HOST_BANDWIDTH = 1e8, 2e8
"""0.1 GB/s in each direction between the two memories, 0.2 GB/s in the host's."""


def device(**changes: float) -> Hardware:
    sheet = find_hardware("a100-80gb").datasheet
    round_numbers = sheet._replace(
        memory_bandwidth=sheet.memory_bandwidth._replace(value=BANDWIDTH),
        host_link=sheet.host_link._replace(value=LINK),
        flops={name: cited._replace(value=FLOPS) for name, cited in sheet.flops.items()},
    )
    rates = {
        "matmul_fraction": 1.0,
        "attention_fraction": 0.5,
        "memory_fraction": 1.0,
        "host_op_s": HOST_OP_S,
        "host_link_fraction": 1.0,
        "host_memory_bandwidth": HOST_BANDWIDTH,
    }
    return replace(
        find_hardware("a100-80gb"), datasheet=round_numbers, calibration=Calibration(**(rates | changes))
    )


HOST = host_times(device())
LAUNCH_S = HOST.launch


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def index(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.long)


def add(time: SimulatedTime, func: Any, *args: Any) -> None:
    time.launch(time.cost(func, args, {}, func(*args)))


def test_a_large_product_takes_its_flops() -> None:
    time = SimulatedTime(device())
    add(time, aten.mm.default, meta(1000, 50_000), meta(50_000, 1000))
    # 2 x 1000 x 50,000 x 1000 = 1e11 FLOPs are 0.1 s; 2 x 50 million elements are 0.2 GB and take 0.2 s
    moved_s = (2 * 50_000_000 + 1_000_000) * 2 / BANDWIDTH
    assert time.now() == pytest.approx(LAUNCH_S + HOST.product + moved_s)
    time = SimulatedTime(device())
    add(time, aten.mm.default, meta(10_000, 10_000), meta(10_000, 10_000))
    # 2e12 FLOPs are 2 s; 3 x 100 million elements are 0.6 s
    assert time.now() == pytest.approx(LAUNCH_S + 2.0)
    assert time.bound() == "compute"


def test_achievable_fractions_stretch_the_time() -> None:
    time = SimulatedTime(device(matmul_fraction=0.5, memory_fraction=0.25))
    add(time, aten.mm.default, meta(10_000, 10_000), meta(10_000, 10_000))
    assert time.now() == pytest.approx(LAUNCH_S + 4.0)
    add(time, aten.add.Tensor, meta(1000, 1000), meta(1000, 1000))
    assert time.now() == pytest.approx(LAUNCH_S + 4.0 + 3 * 2e6 / (0.25 * BANDWIDTH))


def test_attention_has_a_rate_of_its_own() -> None:
    time = SimulatedTime(device())
    query = meta(1, 1, 10_000, 100)
    out = (meta(1, 1, 10_000, 100),)
    time.launch(time.cost(aten._scaled_dot_product_flash_attention.default, (query, query, query), {}, out))
    # two products of 2 x 10,000 x 10,000 x 100 each: 4e10 FLOPs at half of 1e12
    assert time.now() == pytest.approx(LAUNCH_S + 4e10 / 0.5e12)


def test_an_elementwise_operator_takes_its_bytes() -> None:
    time = SimulatedTime(device())
    add(time, aten.add.Tensor, meta(1000, 1000), meta(1000, 1000))
    assert time.now() == pytest.approx(LAUNCH_S + 3 * 1_000_000 * 2 / BANDWIDTH)
    assert time.bytes_moved[""] == 6_000_000
    assert time.bound() == "memory"


def test_an_expanded_tensor_is_read_once() -> None:
    time = SimulatedTime(device())
    add(time, aten.mul.Tensor, meta(1, 1000).expand(1000, 1000), meta(1000, 1000))
    assert time.bytes_moved[""] == 1000 * 2 + 2 * 1_000_000 * 2


def test_the_host_launches_ahead_and_waits_for_nobody() -> None:
    time = SimulatedTime(device())
    for _ in range(10):  # 6 ms each on the device, 1 us to launch
        add(time, aten.add.Tensor, meta(1000, 1000), meta(1000, 1000))
    assert time.now() == pytest.approx(LAUNCH_S + 10 * 6e-3)


def test_who_reads_a_value_back_waits_for_it() -> None:
    """And the device for the launch of what follows, as in every layer with a flash-attn and one row."""
    run = SimulatedRun(tiny(), device(), Settings())
    run.device.recorded = True
    with cuda_behaviour(run.rules), run.device:
        for read_back, waits_s in ((False, 0.0), (True, LAUNCH_S)):
            large = meta(10_000, 10_000)
            value = (large @ large).sum()
            if read_back:
                value.item()
            before_s = run.time.now()
            value.add_(value)
            took_s = 3 * value.nbytes / BANDWIDTH
            assert run.time.now() - before_s == pytest.approx(waits_s + took_s, rel=0.01)


def test_small_operators_take_their_launch() -> None:
    time = SimulatedTime(device())
    for _ in range(10):  # 6 ns each on the device
        add(time, aten.add.Tensor, meta(1), meta(1))
    assert time.now() == pytest.approx(10 * LAUNCH_S, rel=0.01)
    assert time.bound() == "host"


def test_memory_not_yet_written_and_the_hosts_own_tensors_take_the_host_alone() -> None:
    time = SimulatedTime(device())
    add(time, aten.add.Tensor, torch.ones(1000, 1000), torch.ones(1000, 1000))
    add(time, aten.empty_like.default, meta(1000))
    add(time, aten._unsafe_view.default, meta(4, 4), [16])
    assert time.now() == pytest.approx(3 * HOST.operator)
    assert not time.bytes_moved


def test_a_step_of_a_slow_host_is_its_operators_views_and_calls() -> None:
    """A device that takes next to nothing waits for them: the numbers of each, worked out by hand."""
    run = SimulatedRun(tiny(), device(host_op_s=1.0), Settings())
    slow = host_times(device(host_op_s=1.0))

    def double(number: Tensor) -> Tensor:
        return number + number

    with cuda_behaviour(run.rules), run.device:
        number, square = meta(8), meta(8, 8)
        run.device.recorded = True
        run.time.begin_phase("forward")
        with run.device.host_followed():
            double(double(number)).view(2, 4)
            square @ square
        run.time.end_phase()
    calls = 2 + 2  # of `double`, and what contextlib calls as the two contexts of `host_followed` end
    seconds = 3 * slow.launch + slow.product + slow.view + calls * slow.call
    assert run.time.taken_s["forward"] == pytest.approx(seconds, rel=1e-3)


def test_a_calibration_s_host_is_slower_in_everything() -> None:
    usual, slow = host_times(device()), host_times(device(host_op_s=3 * HOST_OP_S))
    assert slow == pytest.approx([3 * each for each in usual])


def test_without_a_calibration_the_host_is_the_one_that_was_fitted() -> None:
    document = json.loads(FILE.read_text())["host"]
    assert Calibration().host_op_s == pytest.approx(document["mean_us"] * 1e-6, rel=0.005)


def test_flops_are_counted_by_phase_and_recomputation_apart() -> None:
    time = SimulatedTime(device())
    product = (meta(10, 20), meta(20, 30))
    flops = 2 * 10 * 20 * 30
    time.phase = "forward"
    add(time, aten.mm.default, *product)
    time.phase = "backward"
    add(time, aten.mm.default, *product)
    add(time, aten.mm.default, *product)
    assert time.recomputed_flops == 0
    time.recomputing = True
    add(time, aten.mm.default, *product)
    assert time.flops == {"forward": flops, "backward": 3 * flops}
    assert time.recomputed_flops == flops
    time.begin_step()
    assert (dict(time.flops), time.recomputed_flops) == ({}, 0)
    assert time.now() > 0  # the clock goes on


@pytest.mark.parametrize("name", ["t4", "v100-16gb"])
def test_integer_products_run_on_a_device_without_bf16(name: str) -> None:
    time = SimulatedTime(find_hardware(name))
    add(time, aten.mm.default, meta(8, 8, dtype=torch.int8), meta(8, 8, dtype=torch.int8))
    assert time.now() > 0


@pytest.mark.parametrize(
    ("func", "arguments", "expected"),
    [
        (aten.zeros_like.default, lambda: [meta(1000)], 2000),
        (aten.zero_.default, lambda: [meta(1000)], 2000),
        (aten.copy_.default, lambda: [meta(1000), meta(1000)], 2 * 2000),
        (aten.copy_.default, lambda: [meta(1000), meta(1).expand(1000)], 2000 + 2),
        (aten.add_.Tensor, lambda: [meta(1000), meta(1000)], 3 * 2000),
        (aten._foreach_add_.List, lambda: [[meta(1000), meta(10)], [meta(1000), meta(10)]], 3 * 2020),
        (aten._foreach_mul.Scalar, lambda: [[meta(1000), meta(10)], 2.0], 2 * 2020),
        # 4 rows of 8 numbers of 2 bytes read and written, and 4 indices of 8 bytes; the table has 100 rows
        (aten.embedding.default, lambda: [meta(100, 8), index(4)], 2 * 4 * 8 * 2 + 4 * 8),
        (aten.index_add_.default, lambda: [meta(100, 8), 0, index(4), meta(4, 8)], 3 * 4 * 8 * 2 + 4 * 8),
        # the gradient is zeros but for one number a row; the log-probabilities are not read again
        (
            aten.nll_loss_backward.default,
            lambda: [meta(1), meta(4, 100), index(4), None, 1, -100, meta(1)],
            2 + 4 * 8 + 2 + 4 * 100 * 2,
        ),
        # the softmax and a search for -inf read the scores; the result is written, read and written again
        (aten._safe_softmax.default, lambda: [meta(4, 100), -1], 5 * 4 * 100 * 2),
    ],
)
def test_bytes_are_those_a_kernel_reads_and_writes(func: Any, arguments: Any, expected: int) -> None:
    args = arguments()
    assert operator_bytes(func, args, {}, func(*args), ()) == expected


@pytest.mark.parametrize("unscales", [False, True])
def test_a_fused_optimizer_writes_gradients_only_to_unscale_them(unscales: bool) -> None:
    """AdamW reads weight, gradient and both moments and writes all but the gradient; counters are 4 bytes."""
    one = lambda: [meta(1000)]  # noqa: E731
    options = dict(lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
    scale = {"grad_scale": meta(1, dtype=torch.float32)} if unscales else {}
    args = (one(), one(), one(), one(), [], [meta(1, dtype=torch.float32)])
    moved = operator_bytes(aten._fused_adamw_.default, args, options | scale, None, ())
    assert moved == 7 * 2000 + 4 + (2000 + 4 if unscales else 0)


def test_what_a_kernel_takes_for_itself_is_written_and_read() -> None:
    x = meta(1000)
    script = [Take(300), Free(0), Take(50), Take(1 << 20, workspace=True)]
    assert operator_bytes(aten.neg.default, (x,), {}, aten.neg.default(x), script) == 2 * 2000 + 2 * 350


def kernel(time: SimulatedTime, milliseconds: float, reads: tuple[int, ...] = ()) -> None:
    time.launch(Cost(0, 0, 0.0, milliseconds * 1e-3), reads)


OURS, THEIRS = 1, 2
"""A storage on the device, and one in host memory."""


def test_a_copy_to_the_host_runs_beside_the_device() -> None:
    time = SimulatedTime(device())
    kernel(time, 5)
    time.copy(1_000_000, True, OURS, THEIRS, beside=True, waits=False)  # 10 ms, once the kernel is done
    kernel(time, 7)
    assert time.now() == pytest.approx(LAUNCH_S + 15e-3)
    time.freed(OURS)  # its memory is used again by what comes now
    kernel(time, 1)
    assert time.now() == pytest.approx(LAUNCH_S + 16e-3)
    assert time.bound() == "memory"
    assert time.bytes_moved[""] == 1_000_000


def test_a_copy_on_the_compute_stream_keeps_the_device_waiting() -> None:
    time = SimulatedTime(device())
    kernel(time, 5)
    time.copy(1_000_000, True, OURS, THEIRS, beside=False, waits=False)  # 10 ms
    kernel(time, 7)
    assert time.now() == pytest.approx(LAUNCH_S + 22e-3)


def test_the_device_waits_for_what_comes_from_the_host() -> None:
    time = SimulatedTime(device())
    time.copy(1_000_000, False, THEIRS, OURS, beside=True, waits=False)
    kernel(time, 3)
    kernel(time, 1, (OURS,))
    assert time.now() == pytest.approx(LAUNCH_S + 11e-3)
    assert time.bound() == "host"


def test_the_two_directions_of_the_link_do_not_wait_for_each_other() -> None:
    time = SimulatedTime(device())
    for storage in range(10, 30, 2):
        time.copy(1_000_000, True, storage, storage + 1, beside=True, waits=False)
        time.copy(1_000_000, False, storage + 1000, storage + 1001, beside=True, waits=False)
    assert time.now() == pytest.approx(10 * 10e-3, rel=1e-3)


def test_the_host_works_on_what_has_arrived_and_sends_it_back() -> None:
    time = SimulatedTime(device())
    time.copy(1_000_000, True, OURS, THEIRS, beside=True, waits=True)  # 10 ms
    kernel(time, 2)  # launched after it
    time.work_on_host(Cost(0, 3_000_000, 0.0, 0.0), [THEIRS])  # 15 ms at 0.2 GB/s
    time.copy(1_000_000, False, THEIRS, OURS, beside=True, waits=False)  # 10 ms
    kernel(time, 1, (OURS,))
    assert time.now() == pytest.approx(36e-3, abs=1e-5)
    assert time.bound() == "host"


def test_offload_costs_the_link_and_the_host_their_time() -> None:
    recipe = {"model": "tiny-llama-bytes", "seq_len": 64, "micro_batch_size": 1, "precision": "bf16"}
    times: dict[str, dict[str, float]] = {}
    host_bytes = 0
    for offload in ("nothing", "activations", "optimizer", "parameters", "checkpoints"):
        chosen = [] if offload == "nothing" else [offload]
        fields = {**recipe, "offload": chosen, "gradient_checkpointing": offload == "checkpoints"}
        profile = simulate(check_recipe(fields, "here"), device())[0]
        times[offload] = {name: phase.time_s.median or 0.0 for name, phase in profile.phases.items()}
        host_bytes = (profile.memory.host_bytes or 0) if offload == "parameters" else host_bytes
    here = times["nothing"]
    assert times["activations"]["backward"] > 1.5 * here["backward"]
    assert times["optimizer"]["optimizer_step"] > 1.5 * here["optimizer_step"]
    inputs = 4 * 64 * 128 * 2  # of as many blocks, tokens and numbers of 2 bytes
    assert times["checkpoints"]["forward"] - here["forward"] == pytest.approx(inputs / LINK, rel=0.1)
    # the host has weights, gradients and two moments: a quarter of it comes in, once in forward
    assert times["parameters"]["forward"] == pytest.approx(host_bytes / 4 / LINK, rel=0.1)


def test_a_4_bit_product_s_weight_is_dequantized_apart() -> None:
    """A quarter of a second to bring the weight back, then a second of product: two kinds of kernels."""
    clock = SimulatedTime(find_hardware("h100"))
    clock.begin_phase("forward")
    clock.launch(Cost(1, 1, 1.0, 0.5, 0.25, "product", "product"))
    assert clock.kernels_s["forward"] == {"product": 1.0, "dequantize": 0.25}
    host = host_times(clock.hardware)
    assert clock.now() == pytest.approx(1.25 + host.launch + host.product)


def test_a_range_reaches_to_a_slow_host_unless_its_speed_is_known() -> None:
    h100 = find_hardware("h100")
    recipe = tiny(precision="bf16")
    slow = slow_host(h100)
    assert slow > 1.5
    ranges, works_s = [], 0.0
    calibrated = h100.calibration.model_copy(update={"host_op_s": 18e-6})
    for hardware in (h100, replace(h100, calibration=calibrated)):
        clock = SimulatedTime(hardware)
        simulate(recipe, h100, Settings(), repeat=False, beside=[clock])
        taken_s = clock.taken_s["forward"]
        works_s = clock.host_works_s["forward"]
        ranges.append(clock.range_s("forward", taken_s)[1] / taken_s)
        assert works_s == pytest.approx(taken_s, rel=0.05)  # kernels so small wait for the host
    assert ranges == pytest.approx([slow, 1.0], rel=0.1)


@pytest.mark.parametrize(("optimizer", "waits"), [("adamw", False), ("adamw_8bit", True)])
def test_bitsandbytes_waits_for_the_device_after_each_weight(optimizer: str, waits: bool) -> None:
    """Its step calls torch.cuda.synchronize (bitsandbytes/optim/optimizer.py): an H100 that is behind the
    host, as here one with a thousandth of the FLOP/s, then waits for the host's work for every weight."""
    behind = SimulatedTime(device(matmul_fraction=1e-3))
    simulate(tiny(precision="bf16", optimizer=optimizer), device(), Settings(), repeat=False, beside=[behind])
    taken_s, works_s = (times["optimizer_step"] for times in (behind.taken_s, behind.host_works_s))
    kernels_s = sum(behind.kernels_s["optimizer_step"].values())
    assert (taken_s > kernels_s + works_s / 2) is waits


def test_a_module_s_time_is_that_of_its_kernels() -> None:
    """The head of the logits is one product in forward, and one for its weight and one for its input in
    backward: all three of the same three matrices, which this device waits to read and write."""
    recipe = check_recipe({"model": "tiny-llama-bytes", "precision": "bf16", "seq_len": 64}, "here")
    phases = simulate(recipe, device())[0].phases
    for phase in phases.values():
        assert sum(phase.modules_s.values()) == pytest.approx(sum(phase.kernels_s.values()))
    shape = load_shape("tiny-llama-bytes")
    rows, width, words = recipe.micro_batch_size * 64, shape.hidden, shape.vocab
    product_s = 2 * (rows * width + width * words + rows * words) / BANDWIDTH
    assert phases["forward"].modules_s["lm_head"] == pytest.approx(product_s)
    assert phases["backward"].modules_s["lm_head"] == pytest.approx(2 * product_s)
    assert set(phases["optimizer_step"].modules_s) == {""}
