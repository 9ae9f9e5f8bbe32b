"""Writes the allocator's statistics and the memory history of this process into the folder of
`harness emulate --out`, as the process ends.

Nothing is written by a process that never used a device, that is killed or that ends by os._exit.
"""

import atexit
import json
import os
import sys

import torch

FOLDER = os.environ.get("VIRTUAL_GPU_OUT")
MOST_ENTRIES = 2_000_000
"""Events in the memory history of a device. PyTorch forgets older ones."""


def install():
    """Record from the first use of a device on, and write as the process ends. To be called once."""
    torch.cuda._lazy_call(_record)  # recording now would begin to use a device, and a fork could not any more
    atexit.register(_write)


def _record():
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")


def _write():
    if not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        return
    rank = os.environ.get("RANK")
    name = f"process-{os.getpid()}" if rank is None else f"rank-{rank}-process-{os.getpid()}"
    path = os.path.join(FOLDER, name)
    statistics = {
        "command": sys.orig_argv,
        "rank": None if rank is None else int(rank),
        "torch": torch.__version__,
        "devices": [
            {
                "name": torch.cuda.get_device_name(device),
                "total_bytes": torch.cuda.get_device_properties(device).total_memory,
                "memory_stats": torch.cuda.memory_stats(device),
            }
            for device in range(torch.cuda.device_count())
        ],
    }
    try:
        torch.cuda.memory._dump_snapshot(f"{path}.pickle")
        with open(f"{path}.json", "w", encoding="utf-8") as file:
            json.dump(statistics, file, indent=1)
    except OSError as error:
        print(f"virtual GPU: cannot write {path}: {error.strerror}.", file=sys.stderr)
