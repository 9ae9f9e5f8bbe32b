"""Estimates of kernels: never below the roofline, growing with the work, and near what others measured."""

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.hardware.hardware import all_hardware, find_hardware, with_cuda
from harness.hardware.roofline import sent_share
from harness.kernel_time import attention, attention_flops, collective, memory, product, range_of
from harness.kernel_time.measured_shapes import between, shape_factor
from harness.kernel_time.parameters import document, is_measured, where_from

A100, H100, A40 = find_hardware("a100-80gb"), find_hardware("h100"), find_hardware("a40")
H100_OF_2023 = with_cuda(H100, 12)
"""With the libraries that vidur measured."""
sides = st.integers(1, 20_000)
devices = st.sampled_from(all_hardware())

MEASURED_PRODUCTS = (
    # device, m, n, k, milliseconds: rows of microsoft/vidur (MIT), of shapes that the fit has not seen
    (A100, 1024, 4096, 2752, 0.111),
    (A100, 4096, 24576, 8192, 6.893),
    (A100, 2048, 12288, 4096, 0.9792),
    (A40, 1024, 4096, 2752, 0.242),
    (A40, 4096, 24576, 8192, 14.3),
    (H100_OF_2023, 4096, 24576, 8192, 2.35),
    (H100_OF_2023, 2048, 12288, 4096, 0.2805),
)
NUMBERS_OF_ROWS_KEPT_ASIDE = (
    # the same, of measured shapes: numbers of rows that measured_shapes.json has not seen
    (A100, 4000, 3072, 4096, 0.4325),
    (A100, 7040, 3584, 4096, 0.921),
    (A40, 480, 12288, 8192, 1.016),
    (A40, 1840, 28672, 8192, 7.269),
    (A40, 2560, 22016, 4096, 4.174),
    (H100_OF_2023, 600, 6144, 8192, 0.096),
    (H100_OF_2023, 1360, 4096, 1024, 0.0235),
)
MEASURED_WITH_CUDA_13 = ((1024, 5120, 5120, 0.069808), (2048, 2560, 5120, 0.069643))
"""m, n, k and milliseconds on an H100: rows of ai-dynamo/aiconfigurator, shapes that the fit has not seen."""


@given(devices, sides, sides, sides, st.integers(1, 8))
def test_no_product_is_faster_than_the_datasheet(device, m, n, k, batch):
    seconds = product(device, "fp16", m, n, k, batch)
    assert seconds >= 2 * m * n * k * batch / device.peak_flops("fp16")
    assert seconds >= 2 * batch * (m * n + n * k + m * k) / device.memory_bandwidth


@given(devices, st.integers(1, 10**11), st.integers(1, 50))
def test_no_kernel_is_faster_than_its_memory(device, moved, launches):
    """Of each kernel 1.25 times the L2 cache at most is not read from the memory."""
    beyond = max(0, moved / launches - 1.25 * device.l2_bytes)
    for kind in ("elementwise", "norm", "softmax", "optimizer", "embedding", "dequantize"):
        assert memory(device, kind, moved, launches) >= launches * beyond / device.memory_bandwidth * (
            1 - 1e-9
        )


MEASURED_CASTS = (
    # device, bytes, milliseconds: rows of ai-dynamo/aiconfigurator (Apache-2.0), the mean of two servers
    ("l40s", 3 * 1024 * 8192, 0.00609),
    ("l40s", 3 * 32768 * 7168, 1.036),
    ("b200", 3 * 32768 * 7168, 0.1145),
    ("rtx-pro-6000", 3 * 1024 * 8192, 0.00546),
    ("rtx-pro-6000", 3 * 32768 * 7168, 0.4734),
)
LARGE_CASTS = (
    # the same, of sizes that the fit has not seen; of an H200 it has seen none
    ("h100", 3 * 31_457_280, 0.033232),
    ("h100", 3 * 65_587_200, 0.069423),
    ("h100", 3 * 251_658_240, 0.25156),
    ("h200", 3 * 31_457_280, 0.024681),
    ("h200", 3 * 65_587_200, 0.053213),
    ("h200", 3 * 251_658_240, 0.17981),
)


def test_what_the_cache_holds_is_faster_than_the_memory():
    for name, moved, ms in MEASURED_CASTS:
        assert memory(find_hardware(name), "elementwise", moved) == pytest.approx(ms * 1e-3, rel=0.3), name
    for name, moved, ms in LARGE_CASTS:
        assert memory(find_hardware(name), "elementwise", moved) == pytest.approx(ms * 1e-3, rel=0.12), name
    l40s = find_hardware("l40s")
    assert memory(l40s, "elementwise", 25e6) < 25e6 / l40s.memory_bandwidth / 3


@given(devices, st.sampled_from(["flash2", "flash3", "cudnn", "efficient"]), st.booleans())
def test_no_attention_is_faster_than_its_flops(device, kernel, causal):
    for direction in ("forward", "backward"):
        for length in (512, 4096):
            shape = (2, 16, length, length, 128)
            flops = attention_flops(*shape, causal=causal, direction=direction)
            seconds = attention(device, kernel, direction, *shape, causal=causal, dtype="fp16")
            assert seconds >= flops / device.peak_flops("fp16")


def test_the_flops_of_attention_by_hand():
    # 2 products of 2 x 1024 x 1024 x 64 for each of 3 x 8 heads; half under the mask; 5 products backward
    whole = 3 * 8 * 2 * 2 * 1024 * 1024 * 64
    shape = (3, 8, 1024, 1024, 64)
    assert attention_flops(*shape, causal=False, direction="forward") == whole
    assert attention_flops(*shape, causal=True, direction="forward") == whole / 2
    assert attention_flops(*shape, causal=False, direction="backward") == 2.5 * whole


@pytest.mark.parametrize("device", [A100, H100, A40], ids=lambda device: device.name)
def test_more_work_takes_longer(device):
    longer = [product(device, "bf16", 4096, 4096, k) for k in (1024, 2048, 4096, 8192, 16384)]
    assert all(a < b for a, b in pairwise(longer))
    moved = [memory(device, "elementwise", 10**power) for power in range(3, 11)]
    assert all(a < b for a, b in pairwise(moved))
    sent = [collective(device, "all_gather", 10.0**power, 8, 8) for power in range(5, 11)]
    assert all(a < b for a, b in pairwise(sent))


def test_a_full_last_wave_costs_less_than_a_row_more():
    """128 tiles of 128 x 256 are a wave of an H100's 132 multiprocessors, and 144 are two."""
    full, beyond = (product(H100_OF_2023, "fp16", m, 4096, 5504, sustained=False) for m in (1024, 1056))
    assert beyond > 1.15 * full  # measured: 58 and 92 us


@pytest.mark.parametrize("sizes", [(1, 2, 1 << 21), (1, 1 << 21, 2), (1 << 21, 2, 1), (16, 16, 1 << 20)])
def test_a_product_of_vectors_waits_for_memory(sizes: tuple[int, int, int]):
    """It has a tile or two of the result, or tiles with nothing to add up: neither decides."""
    m, n, k = sizes
    bytes_moved = 4 * (m * k + k * n + m * n)
    for device in (find_hardware("l40s"), find_hardware("h100")):
        least = bytes_moved / device.memory_bandwidth
        assert least <= product(device, "fp32", m, n, k) < 3 * least


def test_products_of_an_h100_are_those_of_todays_libraries() -> None:
    """Those of 2023 take longer."""
    for m, n, k, ms in MEASURED_WITH_CUDA_13:
        assert product(H100, "bf16", m, n, k, sustained=False) == pytest.approx(ms * 1e-3, rel=0.05)
        assert product(H100_OF_2023, "bf16", m, n, k, sustained=False) > 1.2 * ms * 1e-3
    assert "CUDA 13" in where_from(H100)
    assert "vidur" in where_from(H100_OF_2023)
    assert range_of(H100, "product") != range_of(H100_OF_2023, "product")


def test_products_of_shapes_that_were_kept_aside():
    """By the formula, without what was measured of these shapes since."""
    off = [
        abs(product(device, "fp16", m, n, k, sustained=False) / shape_factor(device, m, n, k) / ms * 1e3 - 1)
        for device, m, n, k, ms in MEASURED_PRODUCTS
    ]
    assert statistics.median(off) < 0.08
    assert max(off) < 0.25


def test_products_of_measured_shapes_at_other_numbers_of_rows():
    off = [
        abs(product(device, "fp16", m, n, k, sustained=False) / (ms * 1e-3) - 1)
        for device, m, n, k, ms in NUMBERS_OF_ROWS_KEPT_ASIDE
    ]
    assert statistics.median(off) < 0.04
    assert max(off) < 0.12


def test_a_shape_has_a_factor_where_it_was_measured_alone():
    assert shape_factor(A40, 4000, 3072, 4096) != 1
    assert shape_factor(A40, 4000, 3073, 4096) == 1  # another shape
    assert shape_factor(find_hardware("rtx-3090"), 4000, 3072, 4096) == 1  # another device
    assert shape_factor(H100, 4000, 3072, 4096) == 1  # other libraries than those that were measured
    assert shape_factor(H100_OF_2023, 4000, 3072, 4096) != 1
    known = [10, 20, 40], [1.0, None, 1.3]
    assert [round(between(*known, m), 9) for m in (1, 10, 20, 30, 40, 99)] == [1, 1, 1.1, 1.2, 1.3, 1.3]


def test_a_device_at_its_power_limit_is_slower():
    alone, at_work = (product(H100, "bf16", 2048, 2048, 2048, sustained=s) for s in (False, True))
    assert at_work > alone
    limited = replace(H100, calibration=H100.calibration.model_copy(update={"sustained_clock": 0.5}))
    assert product(limited, "bf16", 8192, 8192, 8192) > 1.3 * product(H100, "bf16", 8192, 8192, 8192)


def test_a_calibration_s_flat_rate_is_taken_as_it_is():
    flat = replace(A100, calibration=A100.calibration.model_copy(update={"matmul_fraction": 0.5}))
    assert product(flat, "bf16", 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 312e12 / 0.5)


def test_what_ranks_send_by_nccl_tests_table():
    # doc/PERFORMANCE.md: all-reduce 2 (n - 1) / n, all-gather and reduce-scatter (n - 1) / n, broadcast 1
    assert sent_share("all_reduce", 8) == 14 / 8
    assert sent_share("all_gather", 8) == sent_share("reduce_scatter", 8) == 7 / 8
    assert sent_share("broadcast", 8) == 1


def test_between_machines_it_takes_longer_and_no_longer_than_the_cards_alone_would():
    inside = collective(H100, "all_gather", 1e9, 8, 8)
    between = collective(H100, "all_gather", 1e9, 16, 8, network=50e9)
    assert between > inside
    assert 1e9 * 15 / 16 / 400e9 <= between < 4 * 1e9 / 400e9


@pytest.mark.parametrize("kind", ["product", "attention", "memory", "collective", "copy"])
def test_a_range_holds_its_estimate_and_is_wider_where_nobody_measured(kind):
    for device in all_hardware():
        spread = range_of(device, kind)
        assert 0 < spread.low <= 1 <= spread.high
    if kind == "product":
        measured, other = (range_of(device, kind) for device in (A40, find_hardware("rtx-3090")))
        assert other.low < measured.low
        assert other.high > measured.high
    assert is_measured(find_hardware("h200"))
    assert is_measured(find_hardware("b200"))
    assert not is_measured(find_hardware("rtx-4090"))


def test_a_device_says_where_its_rates_are_from():
    assert "12," in where_from(A100)
    assert "vidur" in where_from(A100)
    assert "clocked by 9 reports of its large products" in where_from(find_hardware("rtx-4090"))
    assert "aiconfigurator" in where_from(find_hardware("b200"))
    assert "nobody measured this device" in where_from(find_hardware("a10g"))


@pytest.mark.parametrize(("device", "tflops"), [("l4", 70.89), ("t4", 41.93), ("rtx-4090", 164.81)])
def test_large_products_of_a_card_take_what_its_owners_saw(device: str, tflops: float):
    """The middle report of benchmarks/time/large_products.csv: the best of square products."""
    hardware, dtype = find_hardware(device), "fp16"  # a T4 has no bf16
    sizes = (1024, 2048, 4096, 8192, 10240)
    best = max(2 * n**3 / product(hardware, dtype, n, n, n, sustained=False) for n in sizes)
    assert best == pytest.approx(tflops * 1e12, rel=0.002)


@pytest.mark.parametrize(
    ("device", "gb_per_s", "off"),
    [("rtx-4090", 912, 0.01), ("rtx-3090", 831, 0.01), ("l4", 235, 0.04), ("t4", 240, 0.04)],
)
def test_copies_within_a_card_take_what_others_saw(device: str, gb_per_s: float, off: float):
    """PyTorch's, of half a GB, counted as read and written: benchmarks/time/large_copies.csv. Of an L4 and a
    T4 the estimate knows only elementwise kernels that somebody else measured."""
    assert memory(find_hardware(device), "copy", 1e9) == pytest.approx(1 / gb_per_s, rel=off)


def test_two_geforce_cards_speak_through_the_host():
    """The 3090's bridge is sold apart; without one NVIDIA/nccl#1127 has 6 to 9 GB/s between two."""
    assert 1e9 / 9e9 < collective(find_hardware("rtx-3090"), "broadcast", 1e9, 2, 2) < 1e9 / 2e9
    assert collective(find_hardware("rtx-a6000"), "broadcast", 1e9, 2, 2) < 1e9 / 30e9


def test_what_is_written_was_held_against_rows_kept_aside():
    for found in document()["products"].values():
        assert found["count"] > 1000
        assert found["aside"]["count"] > 300
        assert found["aside"]["median"] < 0.06
    for kinds in document()["memory"].values():
        assert kinds["elementwise"]["aside"]["count"] > 30
