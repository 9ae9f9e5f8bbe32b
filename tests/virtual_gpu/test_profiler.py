"""torch.profiler on a virtual GPU: an unmodified program gets a trace whose kernels, copies and collectives
are on the device's streams, each with the operator that launched it. Read by PyTorch's own tables, and as the
file that Perfetto reads."""

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.hardware import NETWORK, find_hardware
from harness.kernel_time import PowerLimit, collective, product, transfer

pytestmark = pytest.mark.virtual_gpu

H100 = find_hardware("h100")
PROGRAM = """
import json, torch
from torch.profiler import ProfilerActivity, profile

width = 4096
layer = torch.nn.Linear(width, width, bias=False).to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
x = torch.zeros(width, width, device="cuda", dtype=torch.bfloat16)
host, side = torch.empty(16 << 20, dtype=torch.uint8).pin_memory(), torch.cuda.Stream()

def step():
    layer(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.cuda.stream(side):
        moved = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()

step()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    for _ in range(3):
        step()
profiled.export_chrome_trace("trace.json")
print(profiled.key_averages().table(sort_by="cuda_time_total"))
rows = {row.key: [row.count, row.device_time_total] for row in profiled.key_averages()}
print(json.dumps({"rows": rows}))
"""


def events(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Of a trace, by category."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        found[event.get("cat", "")].append(event)
    return found


def test_a_program_that_profiles_itself(emulate, tmp_path: Path) -> None:
    done = emulate(code=PROGRAM)
    product_us = product(H100, "bf16", 4096, 4096, 4096) * PowerLimit(H100).factor * 1e6
    copy_us = transfer(H100, 16 << 20) * 1e6
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert rows["aten::mm"] == [6, pytest.approx(6 * product_us, rel=1e-3)]  # forward, and backward
    assert rows["Memcpy HtoD (Pinned -> Device)"] == [3, pytest.approx(3 * copy_us, rel=0.01)]
    assert "Self CUDA time total" in done.stdout

    found = events(tmp_path / "trace.json")
    kernels, copies, launches = found["kernel"], found["gpu_memcpy"], found["cuda_runtime"]
    names = {kernel["name"] for kernel in kernels}
    assert any("reduce_kernel" in name for name in names), names
    assert {kernel["args"]["stream"] for kernel in kernels} == {7}
    assert len({copy["args"]["stream"] for copy in copies} | {7}) == 2
    by_correlation = {launch["args"]["correlation"]: launch for launch in launches}
    operators = {operator["args"]["External id"]: operator["name"] for operator in found["cpu_op"]}
    for event in kernels + copies:
        launch = by_correlation[event["args"]["correlation"]]
        assert event["ts"] >= launch["ts"]
        assert event["args"]["External id"] in operators
    products = [kernel for kernel in kernels if "gemm" in kernel["name"]]
    assert [operators[kernel["args"]["External id"]] for kernel in products] == ["aten::mm"] * 6
    assert [kernel["dur"] for kernel in products] == pytest.approx([product_us] * 6, rel=0.02)
    kernels.sort(key=lambda kernel: kernel["ts"])
    for before, after in pairwise(kernels):  # one at a time on a stream
        assert after["ts"] >= before["ts"] + before["dur"] - 0.01
    last_launch = max(launch["ts"] for launch in launches if launch["name"] == "cudaLaunchKernel")
    assert kernels[-1]["ts"] - last_launch < 1e6  # one clock: the host waits for the device


RANKS = """
import json, os, torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.zeros(64 << 20, device="cuda", dtype=torch.bfloat16)
whole = torch.zeros(128 << 20, device="cuda", dtype=torch.bfloat16)
def communicate():
    for work in (
        dist.all_reduce(x, async_op=True),
        dist.all_gather_into_tensor(whole, x, async_op=True),
        dist.reduce_scatter_tensor(x, whole, async_op=True),
    ):
        work.wait()
    torch.cuda.synchronize()
communicate()
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    x.add_(1)
    communicate()
profiled.export_chrome_trace(f"rank-{rank}.json")
dist.destroy_process_group()
"""


def test_collectives_of_two_ranks_are_kernels_on_a_stream_of_their_own(emulate, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RANKS, encoding="utf-8")
    start = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "program.py")
    emulate(sys.executable, *start, options=("--gpus", "2"))
    size = 64 << 21
    kinds = {"AllReduce_Sum_bf16": ("all_reduce", size), "AllGather": ("all_gather", 2 * size)}
    kinds["ReduceScatter_Sum_bf16"] = ("reduce_scatter", 2 * size)
    for rank in range(2):
        found = events(tmp_path / f"rank-{rank}.json")["kernel"]
        nccl = [kernel for kernel in found if kernel["name"].startswith("ncclDevKernel_")]
        assert len(nccl) == len(kinds)
        for kernel in nccl:
            name = kernel["name"].removeprefix("ncclDevKernel_").partition("_RING")[0]
            kind, size_bytes = kinds.pop(name) if rank else kinds[name]
            seconds = collective(H100, kind, size_bytes, 2, 2, network=NETWORK.value)
            assert kernel["dur"] == pytest.approx(seconds * 1e6, abs=0.1)
            assert kernel["args"]["device"] == rank
        others = {kernel["args"]["stream"] for kernel in found if kernel not in nccl}
        assert not others & {kernel["args"]["stream"] for kernel in nccl}
