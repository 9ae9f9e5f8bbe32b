"""The clock of a simulated GPU against times worked out by hand, on a device with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.hardware import Calibration, Hardware, find_hardware
from harness.simulated_time import SimulatedTime

aten = torch.ops.aten
FLOPS, BANDWIDTH, LAUNCH_S = 1e12, 1e9, 1e-6
"""Of the device below: 1 TFLOP/s in 16 bit, half in attention, 1 GB/s, 1 us to launch an operator."""


def device(**changes: float) -> Hardware:
    sheet = find_hardware("a100-80gb").datasheet
    round_numbers = sheet._replace(
        memory_bandwidth=sheet.memory_bandwidth._replace(value=BANDWIDTH),
        flops={name: cited._replace(value=FLOPS) for name, cited in sheet.flops.items()},
    )
    rates = {
        "matmul_fraction": 1.0,
        "attention_fraction": 0.5,
        "memory_fraction": 1.0,
        "host_op_s": LAUNCH_S,
    }
    return replace(
        find_hardware("a100-80gb"), datasheet=round_numbers, calibration=Calibration(**(rates | changes))
    )


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def add(time: SimulatedTime, func: Any, *args: Any) -> None:
    time.add(func, args, {}, func(*args))


def test_a_large_product_takes_its_flops() -> None:
    time = SimulatedTime(device())
    add(time, aten.mm.default, meta(1000, 50_000), meta(50_000, 1000))
    # 2 x 1000 x 50,000 x 1000 = 1e11 FLOPs are 0.1 s; 2 x 50 million elements are 0.2 GB and take 0.2 s
    assert time.now() == pytest.approx(LAUNCH_S + (2 * 50_000_000 + 1_000_000) * 2 / BANDWIDTH)
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
    time.add(aten._scaled_dot_product_flash_attention.default, (query, query, query), {}, out)
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


def test_small_operators_take_their_launch() -> None:
    time = SimulatedTime(device())
    for _ in range(10):  # 6 ns each on the device
        add(time, aten.add.Tensor, meta(1), meta(1))
    assert time.now() == pytest.approx(10 * LAUNCH_S, rel=0.01)
    assert time.bound() == "host"


def test_views_and_the_hosts_own_tensors_cost_nothing() -> None:
    time = SimulatedTime(device())
    add(time, aten.view.default, meta(4, 4), [16])
    add(time, aten.add.Tensor, torch.ones(1000, 1000), torch.ones(1000, 1000))
    assert time.now() == 0
    assert not time.bytes_moved


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
