"""nvidia-smi on virtual GPUs: the real program's formats, and the numbers that pynvml reads.

The lines of the real one are those of nvidia-smi 590.48.01 on an H100, as the captures of nvidia_gpu_exporter
have them (github.com/utkuozdemir/nvidia_gpu_exporter, internal/captures).
"""

import json
import re
import sys

import pytest

pytestmark = pytest.mark.virtual_gpu
HELD = """
import json, os, pynvml, subprocess, torch
kept = torch.empty(3 << 30, dtype=torch.uint8, device="cuda:1")
def smi(*words):
    done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True)
    return done.stdout
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(1)
memory = pynvml.nvmlDeviceGetMemoryInfo(device)
"""
REAL_PAGE = """\
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:00:09.0 Off |                    0 |
| N/A   59C    P0            629W /  700W |   19818MiB /  81559MiB |    100%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|    0   N/A  N/A           11327      C   /root/tools/memhog                     2566MiB |
"""
REAL_HEADER = (
    "timestamp, driver_version, count, name, serial, uuid, pci.bus_id, index, vbios_version, fan.speed [%], "
    "pstate, clocks_event_reasons.active, memory.total [MiB], memory.reserved [MiB], memory.used [MiB], "
    "memory.free [MiB], compute_mode, compute_cap, utilization.gpu [%], utilization.memory [%], "
    "ecc.errors.uncorrected.volatile.total, temperature.gpu, power.draw [W], power.limit [W], "
    "clocks.current.graphics [MHz], clocks.current.sm [MHz], clocks.max.memory [MHz], mig.mode.current"
)


def test_its_numbers_are_those_of_nvml(emulate) -> None:
    code = """
fields = "name,uuid,memory.total,memory.used,memory.free,compute_cap,driver_version,count"
gpu = smi("-i", "1", "--query-gpu=" + fields, "--format=csv,noheader,nounits")
name = pynvml.nvmlDeviceGetName(device), pynvml.nvmlDeviceGetUUID(device)
mib = [round(bytes_ / 2**20) for bytes_ in (memory.total, memory.used, memory.free)]
major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
expected = [*name, *mib, f"{major}.{minor}", pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount()]
assert gpu.strip().split(", ") == list(map(str, expected)), (gpu, expected)
assert mib[1] > 3 << 10
(process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
apps = smi("--query-compute-apps=pid,name,used_memory,gpu_uuid", "--format=csv").splitlines()
named = pynvml.nvmlSystemGetProcessName(os.getpid())
used = round(process.usedGpuMemory / 2**20)
assert apps[0] == "pid, process_name, used_gpu_memory [MiB], gpu_uuid"
assert apps[1:] == [f"{os.getpid()}, {named}, {used} MiB, {name[1]}"]
print(smi("-L"))
print(smi("--query-compute-apps=pid", "--format=csv,noheader", "-i", "0") == "\\n")
"""
    lines = emulate(code=HELD + code, options=("--gpus", "2")).stdout.splitlines()
    for index, line in enumerate(lines[:2]):
        assert re.fullmatch(rf"GPU {index}: NVIDIA H100 80GB HBM3 \(UUID: GPU-[-0-9a-f]{{36}}\)", line)
    assert lines[-1] == "True"


def test_the_page_is_laid_out_like_the_real_one(emulate) -> None:
    """And its first lines say that it is virtual."""
    done = emulate(code=HELD + "print(smi())", options=("--gpus", "2")).stdout.splitlines()
    assert "virtual" in done[2]
    boxes, processes = done[3:], done[done.index("") :]
    real = REAL_PAGE.splitlines()
    assert boxes[:5] == real[:5]
    for ours, theirs in zip(boxes[5:9], real[5:9], strict=True):
        bars = [[n for n, each in enumerate(line) if each in "|+"] for line in (ours, theirs)]
        assert bars[0] == bars[1]
    assert boxes[5].startswith("|   0  NVIDIA H100 80GB HBM3  ")
    assert [m.end() for m in re.finditer("MiB", boxes[6])] == [m.end() for m in re.finditer("MiB", real[6])]
    assert processes[:6] == real[9:15]
    (row,) = processes[6:-3]
    assert re.fullmatch(r"\|    1   N/A  N/A +\d+      C   \S.* +\d{4}MiB \|", row)
    assert len(row) == len(real[15])
    assert row.index("C   ") == real[15].index("C   ")


def test_fields_have_the_real_one_s_names_and_units(emulate) -> None:
    names = re.sub(r" \[.*?\]", "", REAL_HEADER).replace(" ", "")
    also = "gpu_name,clocks.sm,clocks_throttle_reasons.active,gpu.power.draw.instant"
    done = emulate(
        "sh",
        "-c",
        f"nvidia-smi --query-gpu={names} --format=csv; nvidia-smi --query-gpu={also} --format=csv;"
        "nvidia-smi --query-gpu=name,cuda_version --format=csv; echo $?; nvidia-smi -i 1; echo $?",
    ).stdout.splitlines()
    assert done[0] == REAL_HEADER
    values = dict(zip(REAL_HEADER.split(", "), done[1].split(", "), strict=True))
    assert re.fullmatch(r"\d{4}(/\d\d){2} \d\d(:\d\d){2}\.\d{3}", values["timestamp"])
    assert re.fullmatch(r"\d+ MiB", values["memory.free [MiB]"])
    assert values["power.draw [W]"] == values["utilization.gpu [%]"] == values["serial"] == "[N/A]"
    assert done[2] == ("name, clocks.current.sm [MHz], clocks_event_reasons.active, power.draw.instant [W]")
    assert done[4:] == [
        'Field "cuda_version" is not a valid field to query.',
        "",
        "2",
        "No devices were found",
        "6",
    ]


def test_libraries_that_read_it(emulate) -> None:
    """accelerate compares the driver's version as a number; torch.utils.collect_env reads lines."""
    code = """
import json
from accelerate.utils import environment
from packaging.version import parse
from torch.utils import collect_env
names, count = environment.get_gpu_info()
assert parse(environment.get_driver_version()) >= parse("550.40.07")
print(json.dumps([names, count, collect_env.get_gpu_info(collect_env.run)]))
"""
    names, count, lines = json.loads(emulate(sys.executable, "-c", code, options=("--gpus", "2")).stdout)
    assert (names, count) == (["NVIDIA H100 80GB HBM3"] * 2, 2)
    assert lines.splitlines() == ["GPU 0: NVIDIA H100 80GB HBM3", "GPU 1: NVIDIA H100 80GB HBM3"]


def test_what_only_a_working_device_has_is_not_supported(emulate) -> None:
    """NVML's own answer of cards that lack a sensor, which programs that log them expect; a library without
    the function is an error that they do not."""
    code = """
import pynvml
pynvml.nvmlInit()
device = pynvml.nvmlDeviceGetHandleByIndex(0)
given = {"Temperature": (0,), "TemperatureThreshold": (0,), "ClockInfo": (0,), "MaxClockInfo": (0,),
         "PcieThroughput": (0,), "NvLinkState": (0,)}
for name in ("UtilizationRates", "EncoderUtilization", "DecoderUtilization", "FanSpeed", "PowerUsage",
             "PowerManagementLimit", "EnforcedPowerLimit", "TotalEnergyConsumption", "PerformanceState",
             *given):
    try:
        getattr(pynvml, "nvmlDeviceGet" + name)(device, *given.get(name, ()))
    except pynvml.NVMLError_NotSupported:
        print("not supported")
"""
    assert emulate(sys.executable, "-c", code).stdout == "not supported\n" * 15
