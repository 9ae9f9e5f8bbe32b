"""Run a command where CUDA is a stand-in: PyTorch's CUDA build, without a GPU.

    python -m tests.stand_in_cuda --device h200 -- python -m benchmarks.gpu_programme --part traces --out DIR

The C files here take the place of the CUDA runtime, the driver, cuBLAS and cuBLASLt. All above them is real:
PyTorch's operators, autograd, the caching allocator, its history and statistics. No kernel computes anything,
values are zeros and times say nothing; but what is allocated and freed, and where, does not depend on them.
cuDNN is real too: it plans its attention for the device, which it is told of in place of a handle.

Needs gcc, nm, the CUDA 13 build of torch (the one on PyPI) and CUDA's headers.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from harness.hardware.hardware import find_hardware
from harness.hardware.table import TABLE_NAMES

HERE = Path(__file__).parent
SOURCES = {
    "libcudart.so.13": ("memory.c", "runtime.c"),
    "libcublas.so.13": ("cublas.c",),
    "libcublasLt.so.13": ("cublasLt.c",),
    "libcuda.so.1": ("driver.c",),
    "libstand_in_cudnn.so": ("cudnn.c",),  # in front of the real one, which it calls
}
SHARED_BYTES = {"7.0": 96, "7.5": 64, "8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""KiB of shared memory that a block can have (CUDA programming guide, technical specifications)."""
COMPILED_FOR = (75, 80, 86, 90, 100, 120)
"""What PyTorch's CUDA 13 builds have code for. A device runs the newest that is not newer than itself."""
HEADERS = Path("/usr/local/cuda/include")
WHEELS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
FIRST_ADDRESS = 0x1000_0000_0000
"""No process has anything there."""


def build(folder: Path, cuda: Path, wheels: Path) -> list[Path]:
    """Compile the libraries into `folder`, with the headers in `cuda` and the wheels' folder nvidia/cu13."""
    headers = (wheels / "include", wheels.parent / "cudnn" / "include", cuda)
    made = []
    for name, sources in SOURCES.items():
        objects = [folder / f"{source}.o" for source in sources]
        for source, compiled in zip(sources, objects, strict=True):
            _run("gcc -O1 -w -fPIC", *(f"-I{path}" for path in headers), "-c", HERE / source, "-o", compiled)
        # everything else that the library exports has no effect and succeeds
        real = wheels / "lib" / name
        wanted = _exported(real) if real.exists() else set()
        if name == "libcuda.so.1":
            wanted = _declared(cuda / "cuda.h")
        rest = folder / f"{name}.c"
        written = _exported(*objects, dynamic=False)
        rest.write_text("".join(f"int {each}(void) {{ return 0; }}\n" for each in sorted(wanted - written)))
        versions = folder / f"{name}.versions"
        versions.write_text(f"{name} {{ global: *; }};\n")
        version_script = f"-Wl,--version-script={versions}" if real.exists() else ""
        library = folder / name
        _run(
            "gcc -O1 -w -fno-builtin -shared -fPIC", *objects, rest, "-o", library,
            f"-Wl,-soname,{name}", version_script,
        )  # fmt: skip
        made.append(library)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")  # what Triton links with
    return made


def surroundings(device: str, libraries: list[Path]) -> dict[str, str]:
    """The environment variables of a process on the stand-in for `device`, a name of the hardware table."""
    hardware = find_hardware(device)
    capability = hardware.datasheet.compute_capability
    number = int(capability.replace(".", ""))
    known_as = next(name for name, table_name in TABLE_NAMES.items() if table_name == device)
    total = int(hardware.memory_bytes)
    return {
        "STAND_IN_CUDA": device,
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "TRITON_LIBCUDA_PATH": str(libraries[0].parent),
        "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0",
        "FAKE_NAME": known_as,
        "FAKE_CAPABILITY": str(number),
        "FAKE_BINARY": str(max(c for c in COMPILED_FOR if c <= max(number, COMPILED_FOR[0]))),
        "FAKE_PROCESSORS": str(hardware.sm_count),
        "FAKE_SHARED": str(SHARED_BYTES[capability] << 10),
        "FAKE_TOTAL": str(total),
        "FAKE_CAPACITY": str(total - int(hardware.calibration.cuda_context_bytes)),
        "FAKE_FIRST": str(FIRST_ADDRESS),
    }


def _run(*words: object) -> str:
    command = [part for word in words for part in shlex.split(str(word))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _exported(*files: Path, dynamic: bool = True) -> set[str]:
    listed = _run("nm --defined-only", "-D" if dynamic else "", *files)
    return {match[1] for match in re.finditer(r" T (\w+)", listed)}


def _declared(header: Path) -> set[str]:
    text = header.read_text()
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    return names | set(re.findall(r"#define\s+cu\w+\s+(cu\w+_v\d)\b", text))


def main() -> int:
    """Exit status: the command's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stand_in_cuda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="h200", help="a name that `harness hardware` lists")
    parser.add_argument("--cuda", type=Path, default=HEADERS, help="CUDA's headers")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        libraries = build(Path(folder), options.cuda, WHEELS)
        environment = os.environ | surroundings(options.device, libraries)
        return subprocess.run(options.command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
