"""Answer three: the training step on a device; and what this machine can do."""

from harness.measure.doctor import examine
from harness.measure.measured_run import RECORDED_STEPS, chosen_device, measure, total_steps
from harness.measure.observer import Progress

__all__ = ["RECORDED_STEPS", "Progress", "chosen_device", "examine", "measure", "total_steps"]
