"""A GPU as the estimates see it: datasheet, calibration, roofline, driver."""

from harness.hardware.hardware import (
    DEFAULT_HARDWARE,
    PLENTY_BYTES,
    Hardware,
    all_hardware,
    find_hardware,
    hardware_names,
    read_prices,
    split_hardware,
    table_device,
    with_memory,
)
from harness.hardware.links import GPUS_PER_NODE, NETWORK, Collective, collective_s, sent_share
from harness.hardware.nvml import Nvml, device_names
from harness.hardware.roofline import (
    Bound,
    Time,
    Work,
    arithmetic_intensity,
    machine_balance,
    transfer_s,
)
from harness.hardware.table import NCCL_COMMUNICATOR, TABLE_NAMES, threads_per_sm

__all__ = [
    "DEFAULT_HARDWARE",
    "GPUS_PER_NODE",
    "NCCL_COMMUNICATOR",
    "NETWORK",
    "PLENTY_BYTES",
    "TABLE_NAMES",
    "Bound",
    "Collective",
    "Hardware",
    "Nvml",
    "Time",
    "Work",
    "all_hardware",
    "arithmetic_intensity",
    "collective_s",
    "device_names",
    "find_hardware",
    "hardware_names",
    "machine_balance",
    "read_prices",
    "sent_share",
    "split_hardware",
    "table_device",
    "threads_per_sm",
    "transfer_s",
    "with_memory",
]
