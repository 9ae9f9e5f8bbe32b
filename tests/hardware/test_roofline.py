"""The roofline's floors, and what it calls the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.hardware.hardware import all_hardware, find_hardware
from harness.hardware.roofline import Work, arithmetic_intensity, machine_balance
from harness.kernel_time import time_of, transfer

A100 = find_hardware("a100-80gb")
works = st.builds(
    Work,
    flops=st.integers(0, 10**16),
    bytes_moved=st.integers(0, 10**13),
    operators=st.integers(0, 1000),
    kind=st.sampled_from(["matmul", "attention", "elementwise"]),
    dtype=st.just("fp16"),
)


@given(st.lists(works, min_size=1, max_size=5), st.sampled_from(all_hardware()))
def test_no_work_is_faster_than_the_datasheet(many, device):
    time = time_of(many, device).seconds
    assert time >= sum(work.flops for work in many) / device.peak_flops("fp16") * (1 - 1e-9)
    assert time >= sum(work.bytes_moved for work in many) / device.memory_bandwidth * (1 - 1e-9)


def test_a_large_product_is_compute_bound_a_copy_memory_bound_and_many_small_ones_host_bound():
    # 8192^3 in bf16: 1.1 TFLOP over 0.4 GB. At 312 TFLOP/s at least 3.5 ms; 0.2 ms of memory.
    product = Work(2 * 8192**3, 3 * 8192**2 * 2, 1, "matmul", "bf16")
    assert time_of([product], A100).bound == "compute"
    assert time_of([product], A100).seconds > 3.5e-3
    assert time_of([Work(0, 10**9)], A100).bound == "memory"
    assert time_of([Work(0, 1000, operators=100)], A100).bound == "host"


def test_machine_balance_of_an_a100_is_153_flops_a_byte():
    assert machine_balance(A100, "bf16") == pytest.approx(312e12 / 2.039e12)
    assert arithmetic_intensity([Work(10, 2), Work(0, 3)]) == 2
    assert arithmetic_intensity([Work(10, 0)]) == 0


def test_the_host_link_carries_what_pcie_4_carries():
    # 31.5 GB/s in one direction: 1 GB takes at least 31.7 ms
    assert 31.7e-3 < transfer(A100, 10**9) < 60e-3


def test_a_dtype_the_device_lacks_is_refused():
    with pytest.raises(InputError, match="bf16"):
        time_of([Work(1, 1, dtype="bf16")], find_hardware("v100-16gb"))
