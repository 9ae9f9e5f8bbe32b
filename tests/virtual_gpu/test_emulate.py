"""Any command on a virtual GPU: what it sees, how it ends, and what it leaves behind."""

import json
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.hardware import all_hardware, find_hardware
from harness.snapshot import read_snapshot
from harness.virtual_gpu import Options, libraries, surroundings
from harness.virtual_gpu.build import exported_functions
from tests.support.commands import run_harness
from tests.support.places import ROOT

pytestmark = pytest.mark.virtual_gpu


def test_the_device_is_the_table_s(emulate) -> None:
    code = """
import torch, json
p = torch.cuda.get_device_properties(0)
count = torch.cuda.device_count()
print(json.dumps([p.name, p.total_memory, p.multi_processor_count, f"{p.major}.{p.minor}", count]))
"""
    for hardware in all_hardware()[:3]:
        name, memory, processors, capability, count = json.loads(emulate(code=code, gpu=hardware.name).stdout)
        assert (memory, processors, count) == (hardware.memory_bytes, hardware.sm_count, 1)
        assert capability == hardware.datasheet.compute_capability
        assert name in surroundings(Options(hardware.name), {})["VIRTUAL_GPU_NAME"]


def test_several_devices_and_what_nvml_sees(emulate) -> None:
    code = """
import pynvml, torch
held = torch.empty(100 << 20, dtype=torch.uint8, device="cuda:1")
try:
    torch.empty(1, device="cuda:3")
except RuntimeError as error:
    print(str(error).splitlines()[0])
pynvml.nvmlInit()
for n in range(pynvml.nvmlDeviceGetCount()):
    handle = pynvml.nvmlDeviceGetHandleByIndex(n)
    print(n, pynvml.nvmlDeviceGetName(handle), len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
free = [torch.cuda.mem_get_info(n)[0] for n in range(3)]
assert free[0] == free[2] > free[1], free
"""
    lines = emulate(code=code, options=("--gpus", "3")).stdout.splitlines()
    name = "NVIDIA H100 80GB HBM3"
    assert lines == ["CUDA error: invalid device ordinal", f"0 {name} 0", f"1 {name} 1", f"2 {name} 0"]


def test_a_late_device_gives_memory_of_two_streams_back_when_it_was_waited_for(emulate) -> None:
    """As CUDA's events say it and PyTorch documents `record_stream`."""
    code = """
import torch
side, mib = torch.cuda.Stream(), 1 << 20
def read_aside():
    x = torch.empty(64 * mib, dtype=torch.uint8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    x.record_stream(side)
def reserved():
    read_aside()
    return torch.cuda.memory_reserved() // mib
first, second = reserved(), reserved()
event = torch.cuda.Event()
event.record()
before = event.query()
event.synchronize()
print(first, second, before, event.query(), reserved(), end=" ")  # the side stream is not waited for
side.synchronize()
print(reserved(), end=" ")
read_aside()
torch.cuda.current_stream().wait_stream(side)
torch.cuda.current_stream().synchronize()
print(reserved())
"""
    assert emulate(code=code).stdout.split() == ["64", "64", "True", "True", "64", "64", "64"]
    late = emulate(code=code, options=("--late",)).stdout.split()
    assert late == ["64", "128", "False", "True", "192", "192", "192"]


def test_memory_that_streams_share_is_free_when_the_clock_says_so(emulate) -> None:
    code = """
import torch
side, mib = torch.cuda.Stream(), 1 << 20
a = torch.empty(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.Event(enable_timing=True).record()  # the clock starts
with torch.cuda.stream(side):
    a @ a
def reserved(products):
    before = torch.cuda.memory_reserved()
    x = torch.empty(64 * mib, dtype=torch.uint8, device="cuda")
    with torch.cuda.stream(side):
        for _ in range(products):
            torch.mm(a, a, out=a)
    x.record_stream(side)
    del x
    return (torch.cuda.memory_reserved() - before) // mib
print(reserved(10000), reserved(0), end=" ")  # 15 seconds of the device, far longer than the host takes
torch.cuda.synchronize()
print(reserved(0))
"""
    assert emulate(code=code, options=("--by-clock",)).stdout.split() == ["64", "64", "0"]
    assert emulate(code=code).stdout.split() == ["64", "0", "0"]
    both = emulate(code=code, options=("--by-clock", "--late"), status=2).stderr
    assert "--by-clock: leave out --late and --no-clock" in both


def test_an_out_of_memory_is_pytorch_s_own(emulate) -> None:
    code = "import torch; torch.empty(30 << 30, dtype=torch.uint8, device='cuda')"
    error = emulate(code=code, gpu="rtx-4090", status=1).stderr
    total = find_hardware("rtx-4090").memory_bytes / 2**30
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 30.00 GiB" in error
    assert f"total capacity of {total:.2f} GiB" in error


@pytest.mark.parametrize("status", [0, 7])
def test_it_ends_with_the_program_s_status(emulate, status: int) -> None:
    emulate("sh", "-c", f"exit {status}", status=status)


def test_a_program_that_ends_by_a_signal_does_so(emulate) -> None:
    emulate("sh", "-c", "kill -TERM $$", status=-signal.SIGTERM)


@pytest.mark.parametrize("ends", ["signal.raise_signal(2)", "raise api.SignalException('', signal.SIGINT)"])
def test_a_ctrl_c_ends_a_program_without_a_traceback(ends: str, emulate) -> None:
    """torchrun makes an exception of it, which of its own gives 1."""
    code = f"import signal\nfrom torch.distributed.elastic.multiprocessing import api\n{ends}"
    done = emulate(code=code, status=-signal.SIGINT)
    assert done.stderr == "virtual GPU: interrupted at <string>:3.\n"


def test_a_crash_in_c_says_so(emulate) -> None:
    code = "import ctypes, torch; torch.empty(1, device='cuda'); ctypes.string_at(0)"
    error = emulate(code=code, status=-signal.SIGSEGV).stderr
    assert "crashed in C (SIGSEGV). The last CUDA call was cuda" in error


NEVER_USED = "virtual GPU: this program never used it"
USE = "import torch; torch.ones(1, device='cuda')"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {USE!r}], check=True)"


@pytest.mark.parametrize(
    ("code", "told", "status"),
    [
        ("import torch; torch.ones(1)", True, 0),
        (USE, False, 0),
        (IN_A_CHILD, False, 0),
        ("raise SystemError", False, 1),  # which has its own reason
    ],
    ids=["on the CPU", "used", "used in a child", "failed"],
)
def test_a_program_that_never_uses_it_is_told_so(emulate, code: str, told: bool, status: int) -> None:
    assert (NEVER_USED in emulate(code=code, status=status).stderr) == told


def test_a_watched_program_that_trains_on_the_cpu_is_told_so(tmp_path: Path) -> None:
    """And asking whether torch is there leaves the hooks in place."""
    code = """
from importlib.util import find_spec
assert find_spec("torch")
import torch
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight])
for _ in range(2):
    weight.sum().backward()
    optimizer.step()
"""
    watch = ("watch", "--gpu", "h100", "--steps", "1-2", "--out", "run", "--", sys.executable, "-c", code)
    said = run_harness(*watch, cwd=tmp_path).stderr
    assert "no step used the virtual h100: the program trained on the CPU" in said
    assert (tmp_path / "run" / "profile.json").exists()


def test_a_stack_that_is_full_says_so_too(emulate) -> None:
    code = """
import ctypes, torch
chain = ctypes.CFUNCTYPE(None)
deeper = chain(lambda: deeper())
import sys, resource
sys.setrecursionlimit(10**9)
torch.empty(1, device="cuda")
deeper()
"""
    assert "crashed in C (SIGSEGV)" in emulate(code=code, status=-signal.SIGSEGV).stderr


def test_libraries_of_another_cuda(emulate, tmp_path: Path) -> None:
    """Or that call what nobody has: PyTorch's or the linker's own error, and a sentence after it."""
    sources = {
        "tomorrow": "int cudaFromTomorrow(void); int call(void) { return cudaFromTomorrow(); }",
        "old": "",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.c").write_text(source)
    compiler = ["cc", "-shared", "-fPIC", "-o"]
    for command in (
        [*compiler, "libcudart.so.7", "old.c", "-Wl,-soname,libcudart.so.7"],
        [*compiler, "libold.so", "old.c", "-Wl,--no-as-needed", "./libcudart.so.7"],
        [*compiler, "libtomorrow.so", "tomorrow.c"],
    ):
        subprocess.run(command, check=True, cwd=tmp_path)
    (tmp_path / "libcudart.so.7").unlink()
    code = "import ctypes, os; ctypes.CDLL('./lib{}.so', mode=os.RTLD_NOW)"
    error = emulate(code=code.format("old"), status=1).stderr
    assert "virtual GPU: a library needs libcudart.so.7, which is not here" in error
    error = emulate(code=code.format("tomorrow"), status=1).stderr
    assert "virtual GPU: there is no cudaFromTomorrow here" in error


def test_another_runtime_is_told_about(emulate, tmp_path: Path) -> None:
    """A library that asks the driver as NVIDIA's runtime of another CUDA does."""
    (tmp_path / "runtime.c").write_text(
        "int cuGetProcAddress_v2(const char*, void**, int, unsigned long, void*);"
        'int find(void) { void* f = 0; return cuGetProcAddress_v2("cuInit", &f, 7000, 0, 0) || f; }'
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "libcudart.so.7", "runtime.c"], check=True, cwd=tmp_path)
    error = emulate(code="import ctypes; l = ctypes.CDLL('./libcudart.so.7'); l.find(); l.find()").stderr
    assert error.count("libcudart.so.7 is the runtime of another CUDA than PyTorch's") == 1


def test_a_command_that_is_not_there(emulate) -> None:
    assert "there is no command nonesuch" in emulate("nonesuch", status=2).stderr
    assert "there is no option --real: --help lists them" in emulate("--real", "true", status=2).stderr


def test_a_file_that_is_no_program(emulate, tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text("echo no interpreter is named")
    (tmp_path / "train.sh").chmod(0o755)
    error = emulate("./train.sh", status=2).stderr
    assert error.startswith("harness: ./train.sh cannot be run: Exec format error.")


def test_real_devices_are_out_of_sight(emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No library of a real driver is loaded, by any name, and the numbers of real devices mean nothing."""
    names = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1", "nvidia-smi")
    for name in names:
        (tmp_path / name).write_text("the real one")
        (tmp_path / name).chmod(0o755)
    for variable in ("LD_LIBRARY_PATH", "PATH"):
        monkeypatch.setenv(variable, str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert "virtual" in emulate("nvidia-smi").stdout
    code = f"""
import ctypes, torch
[ctypes.CDLL(name) for name in {names[:4]}]
torch.ones(1, device="cuda")
maps = open("/proc/self/maps").read().splitlines()
print(sorted({{line.split("/")[-1] for line in maps if "libcuda.so" in line or "nvidia-ml" in line}}))
print({{line.split()[-1].rsplit("/", 1)[0] for line in maps if "libcuda.so" in line}})
"""
    names, folder = emulate(code=code).stdout.splitlines()
    assert names == "['libcuda.so.1', 'libnvidia-ml.so.1']"
    assert folder == str({str(libraries()[0].parent)})


def test_a_program_s_own_sitecustomize_is_imported(
    emulate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert emulate(code="import torch; print(torch.cuda.is_available())").stdout.endswith("mine\nTrue\n")


def test_two_that_build_at_once_and_one_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = subprocess.Popen("true")
    ended.wait()
    killed = tmp_path / "harness" / "virtual-gpu" / f".building-{platform.node()}-{ended.pid}-x"
    killed.mkdir(parents=True)
    command = [sys.executable, "-m", "harness", "emulate", "--gpu", "h100", "--", "true"]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    (built,) = (tmp_path / "harness" / "virtual-gpu").iterdir()
    assert (built / "libcuda.so").resolve().name == "libcuda.so.1"


def test_what_every_process_leaves_in_the_folder(emulate, tmp_path: Path) -> None:
    """Statistics and history from the first allocation on, of a process that runs out of memory too; nothing
    of one that used no device."""
    code = """
import os, torch
unused = os.fork() == 0
if not unused:
    fails = os.fork() == 0
    kept = torch.empty(5 << 20, dtype=torch.uint8, device="cuda:1")
    gone = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
    del gone
    if fails:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda:1")
    os.wait(), os.wait()
    print(os.getpid())
"""
    (process,) = emulate(code=code, options=("--gpus", "2", "--out", "left")).stdout.split()
    folder = tmp_path / "left"
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert {path.name for path in folder.glob("*")} == {
        f"{n}{s}" for n in reports for s in (".json", ".pickle")
    }
    assert len(reports) == 2
    for name, report in reports.items():
        assert (report["command"][1], report["rank"]) == ("-c", None)
        unused, used = (device["memory_stats"] for device in report["devices"])
        assert unused["allocated_bytes.all.peak"] == 0
        assert used["allocated_bytes.all.peak"] == 8 << 20
        assert used["num_ooms"] == (name != f"process-{process}")
        trace = read_snapshot(folder / f"{name}.pickle")["device_traces"][1]
        sizes = [(entry["action"], entry["size"]) for entry in trace]
        assert [each for each in sizes if each[0] in ("alloc", "free_completed")] == [
            ("alloc", 5 << 20),
            ("alloc", 3 << 20),
            ("free_completed", 3 << 20),
        ]


def test_a_recipe(tmp_path: Path) -> None:
    command = ("run", "smoke", "steps=2", "warmup_steps=1", "--gpu", "h100", "--json", "--out", "run")
    profile = json.loads(run_harness(*command, cwd=tmp_path).stdout)
    assert (profile["source"], profile["hardware"]["name"]) == ("emulated", "NVIDIA H100 80GB HBM3")
    times = [profile["step"]["time_s"], *(phase["time_s"] for phase in profile["phases"].values())]
    assert all(0 < time["p10"] <= time["median"] <= time["p90"] and time["n"] == 2 for time in times)
    assert profile["provenance"]["times"].startswith("estimated")
    assert [profile["step"][name] for name in ("loss", "gpu_utilization")] == [None] * 2
    assert profile["memory"]["peak_reserved_bytes"] > profile["memory"]["peak_allocated_bytes"] > 80 << 20
    assert profile["phases"]["backward"]["flops"] >= 2 * profile["phases"]["forward"]["flops"] > 10**9
    assert (tmp_path / "run" / "snapshot.pickle").stat().st_size > 10_000


@pytest.mark.skipif(
    shutil.which("nm") is None, reason="asks nm, of binutils, what a library takes from others"
)
def test_nothing_that_pytorch_calls_is_missing() -> None:
    """What PyTorch's own libraries take from the runtime, the driver, cuBLAS, NCCL and NVML, ours have."""
    import torch

    ours = {name for path in libraries() for name in exported_functions(path)}
    real = (Path(torch.__file__).parents[1] / "nvidia").glob("*/lib/*.so*")
    others = {name for path in real if "cufile" in path.name for name in exported_functions(path)}
    taken = set()
    for library in (Path(torch.__file__).parent / "lib").glob("*.so"):
        shown = subprocess.check_output(["nm", "-D", "--undefined-only", library], text=True)
        taken |= {line.split()[-1].partition("@")[0] for line in shown.splitlines()}
    wanted = {
        name for name in taken if re.match(r"(__)?cuda[A-Z]|cublas|nccl[A-Z]|nvml[A-Z]|cu[A-Z][a-z]", name)
    }
    assert len(wanted) > 100
    assert wanted <= ours | others


def test_a_machine_has_no_more_ranks_than_there_are() -> None:
    made = surroundings(Options("h100", gpus=8, world_size=2, rank=1), {})
    assert (made["LOCAL_WORLD_SIZE"], made["LOCAL_RANK"]) == ("2", "1")
    made = surroundings(Options("h100", gpus=8, world_size=16, rank=11), {})
    assert (made["LOCAL_WORLD_SIZE"], made["LOCAL_RANK"]) == ("8", "3")


def test_what_is_measured_on_a_gpu_is_measured_on_a_virtual_one(emulate) -> None:
    """tests/gpu: what the observer says, against PyTorch's own counters."""
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu", str(ROOT / "tests/gpu"))
    emulate(*command, gpu="h200")
