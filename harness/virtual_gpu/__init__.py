"""A virtual GPU: PyTorch's CUDA build runs any program where no GPU is, and says what memory it needs.

Libraries compiled from c/ take the place of the CUDA runtime, the driver, cuBLAS, NCCL, NVML and CUPTI in a
process of its own. All above them is real: PyTorch's operators, autograd, the caching allocator, its history
and statistics, cuDNN's planning, Triton's compiler, every Python library. No kernel computes anything; what
is allocated and freed, and where, does not depend on that. Each kernel takes the time that harness/kernels
estimates, on a clock (c/clock.c) whose times CUDA events, streams and torch.profiler show. Values that came
from the host are true, and so are the integers and booleans that follow from them
(startup/virtual_gpu_values.py).

Imports no torch, and nothing of the other answers.
"""
# pyright: reportUnusedImport=false

from harness.virtual_gpu.build import libraries, why_not
from harness.virtual_gpu.device import (
    clock_stopped,
    conclude_report,
    device_worked_us,
    emulated_device,
    has_clock,
    runs_alone,
    start_clock,
    where_times_are_from,
)
from harness.virtual_gpu.launch import OVER, Options, emulate, not_found, outside, surroundings
