"""Answer three: the training step on a device; and what this machine can do."""

from harness.measure.cpu_speed import matmul_flops_per_s
from harness.measure.doctor import examine
from harness.measure.measured_run import RECORDED_STEPS, chosen_device, measure, num_gpus, total_steps
from harness.measure.observer import Progress

__all__ = [
    "RECORDED_STEPS",
    "Progress",
    "chosen_device",
    "examine",
    "matmul_flops_per_s",
    "measure",
    "num_gpus",
    "total_steps",
]
