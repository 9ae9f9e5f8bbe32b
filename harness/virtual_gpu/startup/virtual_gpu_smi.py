"""nvidia-smi for virtual GPUs: what NVML (c/nvml.c) says of them, as nvidia-smi 590 prints it.

A field without a meaning for a virtual GPU is [N/A], as it is for a card that does not support it. Fields of
vGPUs, fabrics, platforms and power smoothing are refused like unknown names. Any Python 3.6 or later runs
this file, without its site-packages.
"""

import argparse
import ctypes
import re
import sys
import time

FIELDS = {
    "": """
        timestamp driver_version count name serial uuid index hostname vbios_version pstate compute_{mode,cap}
        pci.{bus_id,domain,bus,device,baseClass,subClass,device_id,sub_device_id} persistence_mode c2c.mode
        pcie.link.gen.{current,gpucurrent,max,gpumax,hostmax} pcie.link.width.{current,max} addressing_mode
        display_{mode,attached,active} {driver_model,gom}.{current,pending} gpu_recovery_action
        inforom.{img,oem,ecc,pwr,checksum_validation} temperature.{gpu,gpu.tlimit,memory} power.management
        clocks_event_reasons.{supported,active,gpu_idle,applications_clocks_setting,sw_power_cap,hw_slowdown}
        clocks_event_reasons.{hw_thermal_slowdown,hw_power_brake_slowdown,sw_thermal_slowdown,sync_boost}
        encoder.stats.{sessionCount,averageFps,averageLatency} {dramEncryption,ecc,mig}.mode.{current,pending}
        ecc.errors.{corrected,uncorrected}.{volatile,aggregate}.{device_memory,dram,register_file,l1_cache}
        ecc.errors.{corrected,uncorrected}.{volatile,aggregate}.{l2_cache,texture_memory,cbu,sram,total}
        ecc.errors.uncorrected.{volatile,aggregate}.sram.{parity,secded} gsp.mode.{current,default}
        ecc.errors.uncorrected.aggregate.sram.{thresholdExceeded,l2,sm,mcu,pcie,other}
        retired_pages.{single_bit_ecc.count,double_bit.count,pending} accounting.{mode,buffer_size}
        remapped_rows.{correctable,uncorrectable,pending,failure}
        remapped_rows.histogram.{max,high,partial,low,none}
    """,
    "%": "fan.speed edpp_multiplier utilization.{gpu,memory,encoder,decoder,jpeg,ofa}",
    "MiB": "{,protected_}memory.{total,used,free} memory.reserved",
    "MHz": "clocks.{current,max}.{graphics,sm,memory} clocks.current.video"
    " clocks.{applications,default_applications}.{graphics,memory}",
    "W": "power.draw {,module.}power.{draw.average,draw.instant,limit,default_limit,min_limit,max_limit}"
    " {,module.}enforced.power.limit",
    "us": "clocks_event_reasons_counters.{sw_power_cap,sync_boost,hw_power_brake_slowdown}"
    " clocks_event_reasons_counters.{sw_thermal_slowdown,hw_thermal_slowdown}",
}
"""The fields of --query-gpu, by unit. {a,b} stands for either a or b."""
ALSO = {
    r"gpu_(name|serial|uuid)": r"\1",
    r"gpu_bus_id": "pci.bus_id",
    r"inforom\.image": "inforom.img",
    r"inforom\.power": "inforom.pwr",
    r"gpu_operation_mode\.(.*)": r"gom.\1",
    r"clocks_throttle_reasons\.(.*)": r"clocks_event_reasons.\1",
    r"(clocks|clocks\.\w+)\.gr": r"\1.graphics",
    r"(clocks|clocks\.\w+)\.mem": r"\1.memory",
    r"clocks\.(graphics|sm|memory|video)": r"clocks.current.\1",
    r"(retired_pages)\.sbe": r"\1.single_bit_ecc.count",
    r"(retired_pages)\.dbe": r"\1.double_bit.count",
    r"(remapped_rows)\.sbe": r"\1.correctable",
    r"(remapped_rows)\.dbe": r"\1.uncorrectable",
    r"(gpu|module)\.(power)\.requested_limit": r"\1.power.limit",
    r"(gpu|module)\.(power)\.current_limit": r"\1.enforced.power.limit",
    r"gpu\.((enforced\.)?power\..*)": r"\1",
}
"""Patterns for other names of those fields, and what they stand for. They are applied one after the other."""
APPS = {"": "timestamp gpu_{name,bus_id,serial,uuid} pid process_name", "MiB": "used_gpu_memory"}
"""The fields of --query-compute-apps, by unit."""
APPS_ALSO = {"name": "process_name", "used_memory": "used_gpu_memory"}
"""Other names of those fields."""
NOTHING = "[N/A]"
PAGE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver:<22} Driver Version: {driver:<14} CUDA Version: {cuda:<8} |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
{devices}

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
{processes}
+-----------------------------------------------------------------------------------------+
These GPUs are virtual (harness emulate): they compute nothing, and have no utilization or temperature."""
DEVICE = """\
| {index:>3}  {name:<26} {no:>6}  |   {bus:<16} {no:>3} | {no:>20} |
| N/A   N/A   {no:>4}            {no:>4} /  {no} | {used:>7}MiB / {total:>6}MiB |    {no:>4}      Default |
|                                         |                        | {no:>20} |
+-----------------------------------------+------------------------+----------------------+"""


class Memory(ctypes.Structure):
    """NVML's nvmlMemory_t: bytes of a device."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("total", "free", "used")]


class Process(ctypes.Structure):
    """NVML's nvmlProcessInfo_t: a process with a context, and the bytes that it uses."""

    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_uint64), ("instances", ctypes.c_uint * 2)]


class Device:
    """One virtual GPU, with the value of each of its fields."""

    def __init__(self, nvml, index):
        self.handle, memory, numbers = ctypes.c_void_p(), Memory(), [ctypes.c_int(), ctypes.c_int()]
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle))
        nvml.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(memory))
        nvml.nvmlDeviceGetCudaComputeCapability(self.handle, *map(ctypes.byref, numbers))
        pci = ctypes.create_string_buffer(68)  # nvmlPciInfo_t, which ends with the bus' name
        nvml.nvmlDeviceGetPciInfo_v3(self.handle, pci)
        bus = pci.raw[36:].split(b"\0")[0].decode()
        domain, number, place = bus.split(":")
        self.fields = {
            "timestamp": now(),
            "driver_version": driver(nvml),
            "count": count(nvml),
            "name": text(nvml.nvmlDeviceGetName, self.handle),
            "uuid": text(nvml.nvmlDeviceGetUUID, self.handle),
            "index": index,
            "pci.bus_id": bus,
            "pci.domain": "0x" + domain[-4:],
            "pci.bus": "0x" + number,
            "pci.device": "0x" + place[:2],
            "memory.total": mib(memory.total),
            "memory.reserved": 0,
            "memory.used": mib(memory.used),
            "memory.free": mib(memory.free),
            "compute_mode": "Default",
            "compute_cap": ".".join(str(number.value) for number in numbers),
        }

    def processes(self, nvml):
        """The fields of each process that has a context on the device."""
        room, found = ctypes.c_uint(4096), (Process * 4096)()
        nvml.nvmlDeviceGetComputeRunningProcesses_v3(self.handle, ctypes.byref(room), found)
        its = {f"gpu_{name}": self.fields[name] for name in ("name", "uuid")}
        its.update({"gpu_bus_id": self.fields["pci.bus_id"], "timestamp": now()})
        for each in found[: room.value]:
            name = text(nvml.nvmlSystemGetProcessName, each.pid)
            yield {**its, "pid": each.pid, "process_name": name, "used_gpu_memory": mib(each.used)}


def text(function, *arguments):
    """The string that a function of NVML writes into a buffer."""
    buffer = ctypes.create_string_buffer(1024)
    function(*arguments, buffer, 1024)
    return buffer.value.decode(errors="replace")


def driver(nvml):
    return text(nvml.nvmlSystemGetDriverVersion)


def count(nvml):
    found = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(found))
    return found.value


def now():
    moment = time.time()
    return time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03}"


def mib(bytes_):
    """`bytes_` in MiB, rounded."""
    return (bytes_ + (1 << 19)) >> 20


def expanded(names):
    """The names that a name with {a,b} in it stands for."""
    found = re.search(r"\{(.*?)\}", names)
    if not found:
        return [names]
    return [each for part in found[1].split(",") for each in expanded(names.replace(found[0], part, 1))]


def queried(query, by_unit, also, rows, layout):
    """The lines that answer a --query-...

    `query`: names of fields, with commas between. `by_unit` and `also`: the fields that there are, as FIELDS
    and ALSO have them. `rows`: for each line, the values by field. `layout`: the parts of --format.
    """
    units = {name: unit for unit in by_unit for names in by_unit[unit].split() for name in expanded(names)}
    fields = []
    for name in query.split(","):
        field = name.strip()
        for pattern, meant in also.items():
            if field not in units:
                field = re.sub(f"^(?:{pattern})$", meant, field)
        if field not in units:
            print(f'Field "{name.strip()}" is not a valid field to query.\n')
            sys.exit(2)
        fields.append(field)
    if "noheader" not in layout:
        yield ", ".join(f"{name} [{units[name]}]" if units[name] else name for name in fields)
    for row in rows:
        shown = []
        for name in fields:
            unit = f" {units[name]}" if units[name] and name in row and "nounits" not in layout else ""
            shown.append(f"{row.get(name, NOTHING)}{unit}")
        yield ", ".join(shown)


def page(nvml, devices):
    """The lines of nvidia-smi without an argument: all devices and processes."""
    version = ctypes.c_int()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    boxes, lines = [], []
    for fields, processes in ((each.fields, each.processes(nvml)) for each in devices):
        name = shortened(fields["name"], 26)
        used, total = fields["memory.used"], fields["memory.total"]
        bus = fields["pci.bus_id"]
        boxes.append(
            DEVICE.format(index=fields["index"], name=name, bus=bus, used=used, total=total, no="N/A")
        )
        for each in processes:
            named = each["process_name"]
            named = named if len(named) <= 36 else "..." + named[-33:]
            its = f"{fields['index']:>5}   N/A  N/A {each['pid']:>15}      C   {named:<36}"
            lines.append(f"|{its}{each['used_gpu_memory']:>7}MiB |")
    none = f"|  {'No running processes found':<87}|"
    yield time.strftime("%a %b %e %H:%M:%S %Y")
    yield PAGE.format(
        driver=driver(nvml),
        cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        devices="\n".join(boxes),
        processes="\n".join(lines) or none,
    )


def shortened(name, most):
    """`name`, cut to at most `most` characters."""
    return name if len(name) <= most else name[: most - 4].rstrip() + " ..."


def log(nvml, devices):
    """The lines of -q, as far as a virtual GPU has values for them."""
    yield "\n==============NVSMI LOG==============\n"
    yield f"{'Timestamp':<55}: " + time.strftime("%a %b %e %H:%M:%S %Y")
    yield f"{'Driver Version':<55}: {driver(nvml)}\n\n{'Attached GPUs':<55}: {count(nvml)}"
    for fields in (each.fields for each in devices):
        yield f"GPU {fields['pci.bus_id']}"
        yield f"    {'Product Name':<51}: {fields['name']}\n    {'GPU UUID':<51}: {fields['uuid']}"
        yield "    FB Memory Usage"
        for name in ("total", "reserved", "used", "free"):
            yield f"        {name.capitalize():<47}: {fields['memory.' + name]} MiB"
    yield ""


def main():
    parser = argparse.ArgumentParser(
        "nvidia-smi", description="nvidia-smi for virtual GPUs.", allow_abbrev=False
    )
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("-q", "--query", action="store_true")
    parser.add_argument("-d", "--display", choices=["MEMORY"])
    parser.add_argument("-i", "--id")
    parser.add_argument("-l", "--loop", type=float, nargs="?", const=5.0)
    parser.add_argument("-lms", "--loop-ms", type=float)
    parser.add_argument("--query-gpu")
    parser.add_argument("--query-compute-apps")
    parser.add_argument("--format", default="")
    options = parser.parse_args()
    layout = options.format.split(",")
    if (options.query_gpu or options.query_compute_apps) and "csv" not in layout:
        parser.error("a query needs --format=csv, or --format=csv,noheader,nounits")
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    pause = options.loop_ms / 1000 if options.loop_ms else options.loop
    while True:
        devices = [Device(nvml, index) for index in range(count(nvml))]
        if options.id:
            names = options.id.split(",")
            keys = ("index", "uuid", "pci.bus_id")
            devices = [each for each in devices if any(str(each.fields[key]) in names for key in keys)]
        if not devices:
            print("No devices were found")
            return 6
        if options.query_gpu:
            lines = queried(options.query_gpu, FIELDS, ALSO, [each.fields for each in devices], layout)
        elif options.query_compute_apps:
            rows = [row for each in devices for row in each.processes(nvml)]
            lines = queried(options.query_compute_apps, APPS, APPS_ALSO, rows, layout)
        elif options.list_gpus:
            lines = ("GPU {index}: {name} (UUID: {uuid})".format(**each.fields) for each in devices)
        else:
            lines = log(nvml, devices) if options.query else page(nvml, devices)
        print("\n".join(lines), flush=True)
        if not pause:
            return 0
        layout.append("noheader")
        time.sleep(pause)


if __name__ == "__main__":
    sys.exit(main())
