"""How long one operation takes on one device: products, attention, kernels that wait for memory, copies and
collectives, each described by what decides its time, with a range. Imports no torch.

The parameters were fitted to kernels that others measured (benchmarks/time/fit.py); a device that nobody
measured follows from its architecture's parameters, multiprocessors, clocks, L2 cache and bandwidth. To time
a whole program, ask `product`, `attention`, `memory`, `transfer` and `collective` once for each launch, add
up the seconds of each kind, and multiply them by `range_of` the kind for their range.
"""
# pyright: reportUnusedImport=false

from harness.kernel_time.estimates import (
    ALIGNED_BYTES,
    CacheRoom,
    KernelKind,
    attention,
    cache_room,
    collective,
    memory,
    product,
    range_of,
    transfer,
    unaligned_product,
)
from harness.kernel_time.fused_attention import attention_flops, causal_length
from harness.kernel_time.host import host_times, slow_host
from harness.kernel_time.parameters import where_from
from harness.kernel_time.power import PowerLimit
from harness.kernel_time.trace import adjust, read_trace
from harness.kernel_time.works import time_of
