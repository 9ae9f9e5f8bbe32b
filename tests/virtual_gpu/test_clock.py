"""The clock of a virtual GPU, as a program sees it: by CUDA's events and streams, and in what is told at the
end. Estimates of single kernels are harness/kernel_time's; what the order of streams and events makes of them
is written down here after CUDA's programming guide."""

import json
import re
import sys
from pathlib import Path

import pytest

from harness.hardware import NETWORK, find_hardware
from harness.kernel_time import PowerLimit, attention, collective, memory, product, transfer
from harness.recipe import load_recipe
from harness.simulate import simulate

pytestmark = pytest.mark.virtual_gpu

H100 = find_hardware("h100")
PRODUCT_MS = product(H100, "bf16", 8192, 8192, 8192) * PowerLimit(H100).factor * 1e3
NANOSECONDS = 1e-5
"""In ms: times are counted in whole nanoseconds, and CUDA gives them as a float."""

BEGIN = """
import json, torch
a = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
out = torch.empty_like(a)
def multiply(times):
    for _ in range(times):
        torch.mm(a, a, out=out)
def event(stream=None):
    made = torch.cuda.Event(enable_timing=True)
    made.record(stream)
    return made
def be_behind():  # however slow the host is, it gives the device more to do before that has done all
    multiply(1000)
event()  # with the first one the clock starts
multiply(1)
be_behind()
"""


def printed(emulate, code: str, **options: object) -> dict[str, float]:
    return json.loads(emulate(code=BEGIN + code, **options).stdout.splitlines()[-1])


def test_products_take_what_kernel_time_says(emulate) -> None:
    code = """
first = event(); multiply(3); second = event(); third = event()
before = second.query(), torch.cuda.current_stream().query()
torch.cuda.synchronize()
after = second.query(), torch.cuda.current_stream().query()
print(json.dumps({"three": first.elapsed_time(second), "none": second.elapsed_time(third),
                  "before": before, "after": after}))
"""
    found = printed(emulate, code)
    assert found["three"] == pytest.approx(3 * PRODUCT_MS, abs=NANOSECONDS)
    assert found["none"] == 0
    assert found["before"] == [False, False]
    assert found["after"] == [True, True]


WORK = ["torch.mm(a, a, out=out)", "a.mul_(2)"]
"""Of cuBLAS, which knows its stream, and of a kernel that is told its stream between <<< and >>>."""
ALONE = """
def work(times):
    for _ in range(times):
        WORK
be_behind = lambda: work(3000)  # so that the cache holds what it will hold
be_behind(); begin = event(); work(4); end = event()
torch.cuda.synchronize()
alone = begin.elapsed_time(end) / 4
"""


@pytest.mark.parametrize("work", WORK)
def test_streams_run_beside_each_other_and_wait_for_events(work: str, emulate) -> None:
    code = """
main, side = torch.cuda.current_stream(), torch.cuda.Stream()
def both(waits):
    torch.cuda.synchronize()
    be_behind()
    begin = event(main)
    side.wait_event(begin)
    with torch.cuda.stream(side):
        work(3)
    if waits:
        main.wait_stream(side)
    work(4)
    main.wait_stream(side)
    end = event(main)
    torch.cuda.synchronize()
    return begin.elapsed_time(end)
print(json.dumps(dict(alone=alone, beside=both(False), after=both(True))))
"""
    found = printed(emulate, ALONE.replace("WORK", work) + code)
    assert found["beside"] == pytest.approx(4 * found["alone"], abs=NANOSECONDS)
    assert found["after"] == pytest.approx(7 * found["alone"], abs=NANOSECONDS)


def test_copies_run_beside_kernels_one_at_a_time_in_each_direction(emulate) -> None:
    code = """
size = 256 << 20
host, back = (torch.empty(size, dtype=torch.uint8).pin_memory() for _ in range(2))
there, here = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
main, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in range(3)]
torch.cuda.synchronize()
be_behind()
begin = event(main)
for stream in streams:
    stream.wait_event(begin)
with torch.cuda.stream(streams[0]):
    there.copy_(host, non_blocking=True)
with torch.cuda.stream(streams[1]):
    here.copy_(host, non_blocking=True)
with torch.cuda.stream(streams[2]):
    back.copy_(there, non_blocking=True)
multiply(2)
ends = [event(stream) for stream in [main, *streams]]
torch.cuda.synchronize()
print(json.dumps([begin.elapsed_time(end) for end in ends]))
"""
    kernels, first, second, back = printed(emulate, code)
    copy_ms = transfer(H100, 256 << 20) * 1e3
    assert kernels == pytest.approx(2 * PRODUCT_MS, abs=NANOSECONDS)
    assert [first, second, back] == pytest.approx([copy_ms, 2 * copy_ms, copy_ms], rel=1e-3)


@pytest.mark.parametrize("work", WORK)
def test_a_graph_takes_what_its_kernels_take(work: str, emulate) -> None:
    code = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    work(4)
torch.cuda.synchronize()
be_behind()
begin = event(); graph.replay(); graph.replay(); end = event()
torch.cuda.synchronize()
replays = begin.elapsed_time(end)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()
except RuntimeError as error:
    print(json.dumps(dict(alone=alone, replays=replays, waiting=str(error).splitlines()[0])))
"""
    found = printed(emulate, ALONE.replace("WORK", work) + code)
    assert found["replays"] == pytest.approx(8 * found["alone"], abs=NANOSECONDS)
    assert "not permitted when stream is capturing" in found["waiting"]


def test_each_device_has_a_clock_of_its_own(emulate) -> None:
    code = """
torch.cuda.synchronize()
be_behind()
begin = event(); multiply(2)
with torch.cuda.device(1):
    other = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(1000):
        other @ other
    first = event(); other @ other; last = event()
end = event()
torch.cuda.synchronize(0), torch.cuda.synchronize(1)
print(json.dumps([begin.elapsed_time(end), first.elapsed_time(last)]))
"""
    found = printed(emulate, code, options=("--gpus", "2"))
    assert found == pytest.approx([2 * PRODUCT_MS, PRODUCT_MS], abs=NANOSECONDS)


def test_without_the_clock_nothing_takes_time(emulate) -> None:
    code = """
print(json.dumps({"over": event().query() and torch.cuda.current_stream().query()}))
"""
    assert printed(emulate, code, options=("--no-clock",)) == {"over": True}
    assert printed(emulate, code) == {"over": False}


TRAINING = """
import sys, torch
from torch import nn
width, layers, rows = 4096, 4, 2048
table = nn.Embedding(1000, width)
model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
model, table = model.to("cuda", torch.bfloat16), table.to("cuda", torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.zeros(rows, dtype=torch.long, device="cuda")
for _ in range(5):
    model(table(tokens).detach()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_step_takes_is_told_at_the_end(emulate, tmp_path: Path) -> None:
    """FLOPs by hand: a product of each layer forward, and two backward but for the first layer's input."""
    done = emulate(code=TRAINING, options=("--out", "out"))
    (path,) = (tmp_path / "out").glob("*-times.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    flops = 2 * 4096 * 4096 * 2048 * (3 * 4 - 1)
    assert (found["source"], found["steps"]) == ("estimated", 4)
    assert found["flops"] == flops
    assert found["tokens_per_s"] == pytest.approx(2048 / found["step_time_s"])
    assert found["hfu"] == found["mfu"] <= 1
    products = 11 * product(H100, "bf16", 2048, 4096, 4096)
    least = PowerLimit(H100).factor  # where this machine's host is what the device waits for
    assert 0.9 * least < found["kernels_s"]["product"] / products < 1.1  # of other shapes backward
    # busy is of the median step and kernels of the last, which the power limit may have slowed down more
    assert found["busy_s"] >= least * found["kernels_s"]["product"]
    assert found["unknown"] == 0
    assert f"a step takes {found['step_time_s'] * 1e3:.1f} ms on this h100, estimated" in done.stderr
    assert "tokens/s; MFU" in done.stderr


def test_a_kernel_that_loses_what_is_written_at_its_end_says_what_a_step_takes(emulate) -> None:
    """A notebook's kernel has a stream of its own in the place of sys.stderr, which nobody reads any more."""
    done = emulate(code=f"{TRAINING}\nimport io, sys\nsys.stderr = io.StringIO()\n")
    assert "virtual GPU: a step takes " in done.stderr


def test_the_busy_time_is_that_of_the_device_in_use(emulate, tmp_path: Path) -> None:
    """With CUDA_VISIBLE_DEVICES=1 the program's device 0 is the second: the first one's account was read."""
    second = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\n' + TRAINING
    # busy is of the median step and kernels of the last: no A100's products take another time in each
    emulate(code=second, gpu="a100-80gb", options=("--gpus", "2", "--out", "out"))
    (path,) = (tmp_path / "out").glob("*-times.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["busy_s"] >= found["kernels_s"]["product"] > 0


def test_the_work_of_a_step_is_set_against_its_own_time(emulate, tmp_path: Path) -> None:
    """Time and work are those of the median step, also where the last has a hundred times the rows."""
    longer = TRAINING.replace("range(5):", "range(5):\n    if _ == 4: tokens = tokens.repeat(100)")
    did = []
    for name, code in (("usual", TRAINING), ("longer", longer)):
        emulate(code=code, options=("--out", name))
        (path,) = (tmp_path / name).glob("*-times.json")
        found = json.loads(path.read_text(encoding="utf-8"))
        did.append(found["hfu"] * found["step_time_s"])
        assert 0 < found["mfu"] <= found["hfu"] <= 1
    assert did[1] == pytest.approx(did[0], rel=1e-6)


ATTENDING = """
import torch
from torch.nn.functional import scaled_dot_product_attention
states = torch.zeros(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
optimizer = torch.optim.SGD([states], lr=0.1)
for _ in range(3):
    scaled_dot_product_attention(states, states, states, is_causal=True).sum().backward()
    optimizer.step()
"""


def test_attention_has_its_time_forward_and_backward(emulate, tmp_path: Path) -> None:
    """cuDNN's on a Hopper, whose backward is given tensors that are not defined: rows are of one length."""
    emulate(code=ATTENDING, options=("--out", "out"))
    (path,) = (tmp_path / "out").glob("*-times.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    asked = 4, 16, 2048, 2048, 128
    each = [attention(H100, "cudnn", way, *asked, causal=True) for way in ("forward", "backward")]
    assert found["kernels_s"]["attention"] == pytest.approx(sum(each), rel=0.05)
    assert found["unknown"] == 0


def test_memory_is_the_same_with_the_clock_and_without(emulate) -> None:
    code = TRAINING + "print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())"
    with_clock, without = (emulate(code=code, options=each).stdout for each in ((), ("--no-clock",)))
    assert with_clock == without


COMMUNICATION = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
a = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
out, sums = torch.empty_like(a), torch.zeros(1 << 30, device="cuda", dtype=torch.bfloat16)
w = torch.nn.Parameter(torch.zeros(8, device="cuda"))
optimizer = torch.optim.SGD([w], lr=0.1)
w.grad = torch.zeros_like(w)
for _ in range(3):
    for _ in range(1000):  # however slow the host is, the device is behind it
        torch.mm(a, a, out=out)
    work = dist.all_reduce(sums, async_op=True)
    for _ in range(2):
        torch.mm(a, a, out=out)
    work.wait()
    torch.mm(a, a, out=out)
    optimizer.step()
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize(("gpu", "boost_hertz"), [("rtx-4090", 2.52e9), ("a100-40gb", 1.41e9)])
def test_a_kernel_that_spins_takes_its_cycles(emulate, gpu: str, boost_hertz: float) -> None:
    """Boost clocks: NVIDIA's whitepapers of Ada, appendix A, and of the A100, table 4."""
    code = f"""
first = event(); torch.cuda._sleep({int(boost_hertz)}); second = event()
torch.cuda.synchronize()
print(json.dumps({{"ms": first.elapsed_time(second)}}))
"""
    assert printed(emulate, code, gpu=gpu)["ms"] == pytest.approx(1000, rel=1e-3)


def test_communication_that_no_kernel_hides(emulate, tmp_path: Path) -> None:
    """A sum among eight takes longer than the two products that run beside it."""
    alone = ("--world-size", "8", "--gpus", "8", "--out", "out")
    emulate(code=COMMUNICATION, options=alone)
    (path,) = (tmp_path / "out").glob("*-times.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    whole = collective(H100, "all_reduce", 2 << 30, 8, 8, network=NETWORK.value)
    assert found["communication_s"] == pytest.approx(whole, rel=1e-4)
    assert found["exposed_communication_s"] == pytest.approx(whole - 2 * PRODUCT_MS * 1e-3, rel=1e-3)


def test_a_program_that_runs_for_long_is_told_of_meanwhile(emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had 20 MiB and 1 GiB at once, whatever PyTorch's own peak says, and the context of the table."""
    monkeypatch.setenv("VIRTUAL_GPU_FIRST_WORD_S", "0.2")
    code = """
import torch, time
w = torch.nn.Parameter(torch.zeros(5 << 20, device="cuda"))
held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
del held
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
optimizer = torch.optim.SGD([w], lr=0.1)
for _ in range(9):
    w.grad = torch.zeros_like(w)
    optimizer.step()
    time.sleep(0.1)
"""
    said = emulate(code=code).stderr.splitlines()
    meanwhile = [line for line in said if "s of this machine, and it goes on: a step takes" in line]
    assert 1 <= len(meanwhile) <= 3
    had = (20 + 1024) / 1024 + H100.calibration.cuda_context_bytes / 2**30
    (end,) = (line for line in said if line.startswith("virtual GPU: a step takes"))
    assert f"Of its 79.11 GiB the process had {had:.2f} at most." in end


def test_a_wait_that_time_time_does_not_know_of_is_told(emulate) -> None:
    """At most what a thousand products take, by the estimate of each."""
    code = """
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.Event(enable_timing=True).record()
for _ in range(1000):
    x @ x
torch.cuda.synchronize()
"""
    told = re.search(r"nobody really waited ([\d,]+) ms for the device", emulate(code=code).stderr)
    assert told
    took_ms = 1000 * product(H100, "bf16", 4096, 4096, 4096) * 1e3
    assert 0 < int(told[1].replace(",", "")) <= took_ms * 1.05
    assert "really waited" not in emulate(code=code, options=("--real-time",)).stderr


def test_a_kernel_finds_in_the_cache_what_was_touched_just_before(emulate) -> None:
    """An L40S has 96 MiB of L2 cache: a gigabyte that was written meanwhile leaves nothing there."""
    code = """
x = torch.zeros(2**23, device="cuda")
large = torch.zeros(2**28, device="cuda")
def taken():
    first = event(); x.mul_(2); last = event()
    return first, last
x.mul_(2)
be_behind()
large.zero_(); large.zero_()
pairs = [taken(), taken()]
torch.cuda.synchronize()
print(json.dumps([first.elapsed_time(last) for first, last in pairs]))
"""
    card = find_hardware("l40s")
    found = printed(emulate, code, gpu="l40s")
    expected = [memory(card, "optimizer", 2**26, held_share=share) * 1e3 for share in (0.0, 1.0)]
    assert found == pytest.approx(expected, rel=1e-3)
    assert found[0] > 3 * found[1]


@pytest.mark.parametrize("kernels", ["standard", "liger"])
def test_the_device_works_as_long_as_in_a_simulation(kernels: str, emulate, tmp_path: Path) -> None:
    fields = ["tiny-llama-bytes", "micro_batch_size=32", "seq_len=512", f"kernels={kernels}"]
    command = (sys.executable, "-m", "harness", "run", *fields, "--out", "run")
    emulate(*command, gpu="l40s", options=("--out", "out"))
    (path,) = (tmp_path / "out").glob("*-times.json")
    # of the last step: the second one's operators do not know yet what their results were in the cache
    operations = json.loads(path.read_text(encoding="utf-8"))["operations"]
    busy_s = sum(each["time_s"] for each in operations if not each["name"].startswith("copy to the "))
    _, recipe = load_recipe(fields[0], fields[1:])
    phases = simulate(recipe, find_hardware("l40s"))[0].phases.values()
    assert busy_s == pytest.approx(sum(sum((phase.kernels_s or {}).values()) for phase in phases), rel=0.02)


def test_a_convolution_takes_as_long_when_its_plans_were_tried_before(emulate) -> None:
    """With cuDNN's benchmark the first call launches a kernel of every plan, and the others one."""
    code = """
images = torch.randn(64, 64, 56, 56, device="cuda").to(torch.float16, memory_format=torch.channels_last)
layer = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda().half().to(memory_format=torch.channels_last)
took = {}
for tried in (False, True):
    torch.backends.cudnn.benchmark = tried
    layer(images[:32] if tried else images)
    be_behind()
    begin = event(); layer(images[:32] if tried else images); end = event()
    torch.cuda.synchronize()
    took[str(tried)] = begin.elapsed_time(end)
print(json.dumps(took))
"""
    found = printed(emulate, code)
    for tried, rows in (("False", 64), ("True", 32)):
        alone = product(H100, "fp16", rows * 56 * 56, 64, 64 * 9) * PowerLimit(H100).factor * 1e3
        assert found[tried] == pytest.approx(alone, rel=0.01)


def test_a_product_that_is_tuned_is_that_of_cublas(emulate) -> None:
    """Of kernels that compute nothing none is the fastest, and of Triton's only the bytes would be known."""
    code = """
multiplied = torch.compile(lambda x: x @ x, mode="max-autotune-no-cudagraphs")
multiplied(a)
be_behind()
begin = event(); multiplied(a); end = event()
torch.cuda.synchronize()
print(json.dumps({"took": begin.elapsed_time(end)}))
"""
    assert printed(emulate, code)["took"] == pytest.approx(PRODUCT_MS, abs=NANOSECONDS)
