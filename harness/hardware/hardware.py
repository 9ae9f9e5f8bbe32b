"""A GPU for estimates: the rates of its datasheet, how much of them real kernels reach, and its price.

Imports no torch. Units: bytes, FLOP/s, bytes per second, seconds, and the user's currency per hour.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.errors import InputError, nearest
from harness.hardware.table import DATASHEETS, FP8_SINCE, MIB, NOT_MODELLED, TABLE_NAMES, Datasheet
from harness.step_profile import HardwareSummary, StepProfile
from harness.system import (
    CUBLAS_WORKSPACE_BYTES,
    HOPPERS_CUBLAS_WORKSPACE_BYTES,
    TorchRelease,
    installed_version,
    parse_json,
    profiles_folder,
    read_mapping,
    read_whole,
)

if TYPE_CHECKING:
    from harness.recipe import Recipe


def table_device(profile: StepProfile) -> "Hardware | None":
    """The device of the hardware table that a profile was made on, or for; None for a CPU.

    Raises InputError for a GPU that the table does not have.
    """
    device = profile.hardware
    if device.kind == "cpu":
        return None
    if device.kind == "table":
        return find_hardware(device.name)
    if device.name not in TABLE_NAMES:
        raise InputError(
            f"the hardware table does not have {device.name}. Say which device to predict for: hardware=NAME."
        )
    return find_hardware(TABLE_NAMES[device.name])


def split_hardware(overrides: Sequence[str], memory: str | None = None) -> "tuple[Hardware, list[str]]":
    """The device that `hardware=NAME` among `overrides` names, or DEFAULT_HARDWARE, and the other overrides.
    The device has `memory` (as 16GiB) if that is given. Raises InputError."""
    names = [text.partition("=")[2].strip() for text in overrides if text.startswith("hardware=")]
    if len(names) > 1:
        raise InputError(f"hardware is given twice: {' and '.join(names)}. Keep one.")
    rest = [text for text in overrides if not text.startswith("hardware=")]
    chosen = find_hardware(names[0] if names else DEFAULT_HARDWARE)
    return (chosen if memory is None else with_memory(chosen, parse_bytes(memory))), rest


DEFAULT_HARDWARE = "h100"
MAX_CALIBRATION_BYTES = 1_000_000
PLENTY_BYTES = 2**50
"""A memory size in which every step fits, to see how much one would take."""

Achieved = Annotated[float, Field(gt=0, le=1)]


class Calibration(BaseModel):
    """How much of the datasheet's rates kernels reach, and what libraries take. Fractions are in (0, 1]."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = (
        "datasheet, public measurements of kernels, and guesses: nothing was measured on this device"
    )
    matmul_fraction: Achieved | None = None
    """The fraction of dense 16-bit FLOP/s that all products reach; null: by shape, from
    harness/kernel_time."""
    fp32_matmul_fraction: Achieved | None = None
    """The same for fp32's FLOP/s; null: the value of matmul_fraction."""
    attention_fraction: Achieved | None = None
    """The fraction of dense FLOP/s that attention reaches, forward and backward. The whole square of scores
    is counted, as PyTorch's counter does, though a causal kernel computes half. null: harness/kernel_time has
    one by kernel and shape."""
    memory_fraction: Achieved | None = None
    """The fraction of memory bandwidth that every kernel reaches which waits for memory; null:
    harness/kernel_time has one by kind and size."""
    product_scale: Annotated[float, Field(gt=0)] = 1.0
    """The time of this very device's products, in a trace that was recorded on it, over the time that
    harness/kernel_time estimates."""
    attention_scale: Annotated[float, Field(gt=0)] = 1.0
    """The same for fused attention."""
    memory_scale: Annotated[float, Field(gt=0)] = 1.0
    """The same for kernels that wait for memory."""
    cuda: Annotated[int, Field(ge=12)] = 13
    """The release of CUDA whose libraries multiply: 12 for those of 2023 (12.1). Only on an H100 and an H200
    were both measured."""
    sustained_clock: Achieved | None = None
    """The fraction of the boost clock that long products keep at the power limit; null: what was seen on
    other devices of the architecture."""
    host_link_fraction: Achieved = 0.8
    """The fraction of the host link's rate that copies of pinned memory reach. A guess, where it was not
    measured: about 25 of PCIe 4.0's 31.5 GB/s. An H100's reach more (profiles/h100/calibration.json)."""
    host_memory_bandwidth: Annotated[float, Field(gt=0)] = 50e9
    """Bytes per second that AdamW reaches when it steps 16-bit weights in host memory. A guess."""
    host_op_s: Annotated[float, Field(gt=0)] = 17.3e-6
    """Seconds that the host takes for one operator in eager mode, in the mean over a LoRA step of a 1B model:
    Python, PyTorch and driver (`python -m benchmarks.gpu_programme --part calibrate --only launch`). It says
    how fast a machine is; what launches, products, views and Python calls take is in proportion to it. Python
    and PyTorch were measured on a Xeon with a virtual GPU, the driver on the H100's machine
    (profiles/cpu/host_times.json). It belongs to a machine, not to its card."""
    cublas_workspace_bytes: Annotated[int, Field(ge=0)] | None = None
    """Bytes of all cuBLAS workspaces together; null: PyTorch's default for the architecture."""
    cuda_context_bytes: Annotated[int, Field(ge=0)] = 500 * MIB
    """Bytes that NVML counts for a process beyond PyTorch's reserved memory. A guess, where it was not
    measured as on an H100 (profiles/h100/calibration.json): people report 300 to 700 MiB, depending on GPU
    and driver (github.com/pytorch/pytorch/issues/107667, 20532, 37250)."""


@dataclass(frozen=True)
class Hardware:
    """A device of the table, with its calibration and, if the user gave one, its price per hour."""

    datasheet: Datasheet
    calibration: Calibration = field(default_factory=Calibration)
    price_per_hour: float | None = None

    @property
    def name(self) -> str:
        return self.datasheet.name

    @property
    def sm_count(self) -> int:
        """Streaming multiprocessors."""
        return self.datasheet.sm_count

    @property
    def l2_bytes(self) -> int:
        """Bytes of the second-level cache."""
        return self.datasheet.l2_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that CUDA sees."""
        return int(self.datasheet.memory_bytes.value)

    @property
    def memory_bandwidth(self) -> float:
        """The datasheet's memory bandwidth, in bytes per second."""
        return self.datasheet.memory_bandwidth.value

    @property
    def cublas_workspace_bytes(self) -> int:
        """Bytes of the workspaces that PyTorch keeps for cuBLAS, one for each thread that multiplies; 0 where
        a release is installed that keeps none.

        Forward runs in the Python thread and backward in autograd's, each with its own handle. Capabilities
        above 9.0 have Hopper's workspace since PyTorch 2.12.
        """
        torch = installed_version("torch")
        if torch is not None and not TorchRelease.of(torch).keeps_cublas_workspaces:
            return 0
        if self.calibration.cublas_workspace_bytes is not None:
            return self.calibration.cublas_workspace_bytes
        large = float(self.datasheet.compute_capability) >= 9
        return 2 * (HOPPERS_CUBLAS_WORKSPACE_BYTES if large else CUBLAS_WORKSPACE_BYTES)

    def supports(self, dtype: str) -> bool:
        """Whether the device multiplies matrices of `dtype` (fp32, tf32, bf16, fp16, fp8) in hardware."""
        return ("bf16" if dtype == "tf32" else dtype) in self.datasheet.flops

    def peak_flops(self, dtype: str) -> float:
        """The datasheet's dense FLOP/s in `dtype`. Raises InputError if the device has no such units.

        Tensor cores that multiply in bf16 do so in tf32, at half of its rate, on every device that has either
        (NVIDIA's data sheets of A100, A40, L40S, H100 and B200).
        """
        if dtype == "tf32" and self.supports(dtype):
            return self.datasheet.flops["bf16"].value / 2
        if not self.supports(dtype):
            has = ", ".join(self.datasheet.flops)
            raise InputError(
                f"hardware: {self.name} has no {dtype} units (it computes in {has}); "
                "set precision: fp16, or choose another device."
            )
        return self.datasheet.flops[dtype].value

    def lacks(self, recipe: "Recipe") -> str:
        """What the recipe needs and the device lacks, as "no bf16 units"; empty if it lacks nothing."""
        missing = next((dtype for dtype in recipe.dtypes_of_products if not self.supports(dtype)), None)
        if missing is not None:
            return f"no {missing} units"
        old = float(self.datasheet.compute_capability) < recipe.flash_capability
        return "no flash attention" if old else ""

    def check(self, recipe: "Recipe") -> None:
        """Raise InputError if the device lacks what the recipe needs."""
        self.peak_flops(recipe.compute_dtype)
        lacking = self.lacks(recipe)
        if lacking:
            needs = {
                "no bf16 units": "Muon multiplies in bf16, which needs 8.0; set optimizer: adamw",
                "no fp8 units": f"products in fp8 need {FP8_SINCE}; set fp8: false",
                "no flash attention": "the packages of flash attention need 8.0, and the fourth 9.0; "
                "set attention: sdpa",
            }
            raise InputError(
                f"hardware: {self.name} has compute capability {self.datasheet.compute_capability}, and "
                f"{needs[lacking]}, or choose another device."
            )

    def summary(self, dtype: str) -> HardwareSummary:
        """The device as a StepProfile describes it, with its FLOP/s in `dtype`."""
        return HardwareSummary(
            name=self.name,
            kind="table",
            memory_bytes=self.memory_bytes,
            peak_flops=self.peak_flops(dtype),
            memory_bandwidth=self.memory_bandwidth,
        )


def with_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    """The device with `memory_bytes` of memory, for questions that name a memory size and no device."""
    cited = hardware.datasheet.memory_bytes._replace(value=memory_bytes)
    return replace(hardware, datasheet=hardware.datasheet._replace(memory_bytes=cited))


def with_cuda(hardware: Hardware, cuda: int) -> Hardware:
    """The device with the libraries of that release of CUDA, for programs of other years."""
    return replace(hardware, calibration=hardware.calibration.model_copy(update={"cuda": cuda}))


def parse_bytes(text: str) -> int:
    """The bytes of `16GiB` (2**30 each) or `16GB` (1e9 each), or of a plain number of at least a MiB.

    Raises InputError for any other text.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([KMGT]i?B|B|)\s*", text)
    unit = match[2] if match else ""
    factor = {"": 1, "B": 1} | {
        f"{letter}{i}B": (1024 if i else 1000) ** power
        for power, letter in enumerate("KMGT", start=1)
        for i in ("", "i")
    }
    size = float(match[1]) * factor[unit] if match else 0.0
    if not 1 <= size < float("inf") or (not unit and size < 2**20):  # 16 is not meant as 16 bytes
        raise InputError(
            f"--memory {text}: write a size such as 16GiB (2**30 bytes each) or 16GB (1e9 each)."
        )
    return int(size)


def hardware_names() -> list[str]:
    """Names of the devices in the table, in its order."""
    return [sheet.name for sheet in DATASHEETS]


def find_hardware(name: str, prices: dict[str, float] | None = None) -> Hardware:
    """The device called `name`, with its price per hour if `prices` has one, and with the calibration in
    profiles/<name>/calibration.json if there is one.

    Raises InputError naming the known devices, or the calibration file that cannot be read.
    """
    for sheet in DATASHEETS:
        if sheet.name == name.lower():
            return Hardware(sheet, _calibration(sheet.name), (prices or {}).get(sheet.name))
    if name.lower() in NOT_MODELLED:
        memory, has = NOT_MODELLED[name.lower()]
        raise InputError(
            f"hardware: AMD's GPUs are not in the table: {has}, but which kernels run on it, what they take "
            f"beside and how fast they are is not modelled. What holds there too is the memory of weights, "
            f"gradients, optimizer states and activations: ask with --memory {memory} and without hardware."
        )
    raise InputError(
        f"hardware: there is no {name} in the table.{_meant(name)} It has {', '.join(hardware_names())}. "
        "`harness simulate`, `fit` and `napkin` ask about any other card by --memory and its size."
    )


def _meant(name: str) -> str:
    """A " Did you mean ...?" with the devices that `name` abbreviates (a100), spells out (NVIDIA RTX 4090) or
    misspells; empty if there are none."""
    many, _, one = name.lower().partition("x")
    several = many.strip().isdigit() and one.strip() != ""  # as in 2x3090
    bare = _bare(one if several else name)
    abbreviated = [other for other in hardware_names() if bare and bare in _bare(other)]
    contained = max((other for other in hardware_names() if _bare(other) in bare), key=len, default=None)
    by_driver = [sheet.name for sheet in DATASHEETS if _bare(sheet.driver_name) == bare]
    meant = by_driver or abbreviated or ([contained] if contained else [])
    # spellings must be very alike: most of a name is its number, and another number is another card
    hint = f" Did you mean {' or '.join(meant)}?" if meant else nearest(name, hardware_names(), alike=0.85)
    return f"{hint} `harness fit` and `shard` take {many.strip()} of them by --gpus." if several else hint


def _bare(name: str) -> str:
    """`name` in lower case, with letters and digits alone."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def all_hardware(prices: dict[str, float] | None = None) -> list[Hardware]:
    """Every device of the table."""
    return [find_hardware(name, prices) for name in hardware_names()]


def read_prices(file: Path | None, pairs: Sequence[str]) -> dict[str, float]:
    """Prices per hour by device, from a YAML file of `name: price` lines and from `name=price` pairs. A pair
    overrides the file.

    Raises InputError for an unknown device or a price that is not a positive number.
    """
    entries: list[tuple[str, object, str]] = []
    if file is not None:
        entries += [(name, price, str(file)) for name, price in read_mapping(file, "price list").items()]
    for pair in pairs:
        name, equals, price = pair.partition("=")
        if not equals:
            raise InputError(f"--price {pair}: write it as name=price, for example h200=3.5.")
        entries.append((name, price, "--price"))
    return {find_hardware(name).name: _price(name, price, origin) for name, price, origin in entries}


def _price(name: str, value: object, origin: str) -> float:
    """The price of `name`. Raises InputError, beginning with `origin`, for anything but a positive number."""
    try:
        price = float(str(value))
    except ValueError:
        price = float("nan")
    if not 0 < price < float("inf"):
        raise InputError(f"{origin}: the price of {name} is {value!r}; give a positive number per hour.")
    return price


def _calibration(name: str) -> Calibration:
    """The committed calibration of a device, or the defaults."""
    path = profiles_folder() / name / "calibration.json"
    try:
        return Calibration.model_validate(parse_json(read_whole(path, MAX_CALIBRATION_BYTES)))
    except FileNotFoundError:
        return Calibration()
    except (OSError, ValueError, ValidationError) as error:
        first_line = str(error).splitlines()[0]
        raise InputError(
            f"{path} is not a calibration: {first_line}. Delete it or calibrate again."
        ) from None
