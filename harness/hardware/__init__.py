"""A GPU as the estimates see it: datasheet, calibration, roofline, driver."""

from harness.hardware.hardware import (
    DEFAULT_HARDWARE,
    PLENTY_BYTES,
    Hardware,
    all_hardware,
    find_hardware,
    hardware_names,
    parse_bytes,
    read_prices,
    split_hardware,
    table_device,
    with_memory,
)
from harness.hardware.links import Collective, collective_s
from harness.hardware.nvml import Nvml, device_names
from harness.hardware.roofline import (
    Bound,
    Time,
    Work,
    achievable_flops,
    arithmetic_intensity,
    machine_balance,
    time_of,
    transfer_s,
)
from harness.hardware.table import NCCL_COMMUNICATOR, TABLE_NAMES, threads_per_sm

__all__ = [
    "DEFAULT_HARDWARE",
    "NCCL_COMMUNICATOR",
    "PLENTY_BYTES",
    "TABLE_NAMES",
    "Bound",
    "Collective",
    "Hardware",
    "Nvml",
    "Time",
    "Work",
    "achievable_flops",
    "all_hardware",
    "arithmetic_intensity",
    "collective_s",
    "device_names",
    "find_hardware",
    "hardware_names",
    "machine_balance",
    "parse_bytes",
    "read_prices",
    "split_hardware",
    "table_device",
    "threads_per_sm",
    "time_of",
    "transfer_s",
    "with_memory",
]
