"""What is known of a GPU: its datasheet, its calibration, its roofline, and what its driver says."""
# pyright: reportUnusedImport=false

from harness.hardware.hardware import (
    DEFAULT_HARDWARE,
    PLENTY_BYTES,
    Calibration,
    Hardware,
    all_hardware,
    find_hardware,
    hardware_names,
    parse_bytes,
    read_prices,
    split_hardware,
    table_device,
    with_cuda,
    with_memory,
)
from harness.hardware.nvml import Nvml, device_names
from harness.hardware.roofline import (
    GPUS_PER_NODE,
    NETWORK,
    Bound,
    Collective,
    Time,
    Work,
    arithmetic_intensity,
    machine_balance,
    sent_share,
)
from harness.hardware.step_time import PhaseTime, StepTime
from harness.hardware.table import FP8_SINCE, TABLE_NAMES, threads_per_sm
