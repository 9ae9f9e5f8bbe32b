"""What a process leaves in the folder of `harness emulate --out` as it ends: the allocator's statistics and
its memory history.

A process that never used a device leaves nothing; neither does one that is killed or leaves by os._exit.
"""

import atexit
import json
import os
import sys

import torch

FOLDER = os.environ.get("VIRTUAL_GPU_OUT")
MOST_ENTRIES = 2_000_000
"""Of the history of a device: what is older than that is forgotten."""


def install():
    """Record from the first use of a device on, and write at the end. To be called once."""
    torch.cuda._lazy_call(_record)  # a process that will fork must not have begun to use a device
    atexit.register(_write)


def _record():
    torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES, stacks="python")


def _write():
    if not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        return
    rank = os.environ.get("RANK")
    name = f"process-{os.getpid()}" if rank is None else f"rank-{rank}-process-{os.getpid()}"
    path = os.path.join(FOLDER, name)
    found = {
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
            json.dump(found, file, indent=1)
    except OSError as error:
        print(f"virtual GPU: cannot write {path}: {error.strerror}.", file=sys.stderr)
