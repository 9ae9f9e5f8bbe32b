"""The measured answer: the training step on a device. Also what this machine can do, and the observers that
measure any loop."""
# pyright: reportUnusedImport=false

from harness.measure.devices import chosen_device, joining_observer, matmul_flops_per_s, num_gpus
from harness.measure.doctor import examine
from harness.measure.leak import find_kept
from harness.measure.looking_back import LookBack, look_back
from harness.measure.measured_run import measure, total_steps
from harness.measure.observer import DeviceObserver, Progress, Silent
from harness.measure.step_times import log_line, peak_rss_bytes, phase_stats, step_stats
