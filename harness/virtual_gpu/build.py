"""The libraries of the virtual GPU: compiled from c/ at first use, with the headers in PyTorch's own wheels.

They are kept in the user's cache, in a folder named by sources and versions. Two processes that compile at
once both succeed.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness.errors import InputError


def exported_functions(library: Path) -> set[str]:
    """Names of the functions that a library exports, as nm tells them, which comes with the linker."""
    shown = subprocess.check_output(["nm", "-D", "--defined-only", library], text=True)
    lines = (line.split() for line in shown.splitlines())
    return {name.partition("@")[0] for *_, kind, name in lines if kind in "TW"}


SOURCES = Path(__file__).parent / "c"
FIRST_TORCH, LAST_TORCH = (2, 11), (2, 15)
"""The oldest and the newest release of PyTorch that the virtual GPU was tried with."""
CUDNN = "libvirtual_gpu_cudnn.so"
"""The library in front of the real cuDNN, which it calls."""
RUNTIME = (
    "memory.c",
    "processes.c",
    "runtime.c",
    "kernels.c",
    "streams.c",
    "clock.c",
    "launches.c",
    "l2_cache.c",
    "crash.c",
)
"""The sources of the CUDA runtime."""
CXX = ("c++", "g++", "clang++")
OPERATORS = "libvirtual_gpu_operators.so"
"""The library that tells the clock which operator runs. It is C++, compiled against PyTorch's headers, and is
loaded once torch is imported."""


@dataclass(frozen=True)
class Torch:
    """The installed PyTorch, read from its files: importing it takes seconds."""

    folder: Path
    """The folder of the package torch."""
    version: str
    """For example 2.13.0+cu130."""
    cuda_version: str | None
    """For example 13.0; None for a build without CUDA."""

    @property
    def cuda_major(self) -> str:
        return (self.cuda_version or "").partition(".")[0]

    @property
    def wheels(self) -> Path:
        """The folder that NVIDIA's wheels are installed in: nvidia, next to torch."""
        return self.folder.parent / "nvidia"


def installed_torch() -> Torch | None:
    """The PyTorch of this Python interpreter; None where there is none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    text = (folder / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda: [^=]*= (?:'([^']+)'|None)", text, re.MULTILINE)
    return Torch(folder, version[1] if version else "unknown", cuda[1] if cuda else None)


def why_not() -> str | None:
    """Why there can be no virtual GPU on this machine, with what to do about it; None where there can be."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        here = f"{platform.system()} {platform.machine()}"
        return (
            f"a virtual GPU needs Linux on x86-64, and this is {here}. Run it in a Linux container or a "
            "virtual machine; `harness simulate` works here."
        )
    installed = installed_torch()
    if installed is None:
        return "a virtual GPU needs PyTorch, which is not installed. Run: pip install torch"
    if installed.cuda_version is None:
        plain = installed.version.partition("+")[0]
        return (
            f"a virtual GPU needs PyTorch's CUDA build, and this one ({installed.version}) is built without "
            f"CUDA. Run: pip install 'torch==={plain}' (three = signs: the build that PyPI has is the "
            "CUDA build on Linux); in a checkout `make virtual-gpu` makes such an environment."
        )
    numbers = tuple(map(int, re.findall(r"\d+", installed.version)[:2]))
    if not FIRST_TORCH <= numbers <= LAST_TORCH and not os.environ.get("VIRTUAL_GPU_ANY_TORCH"):
        first, last = (".".join(map(str, each)) for each in (FIRST_TORCH, LAST_TORCH))
        return (
            f"the virtual GPU has been tried with PyTorch {first} to {last}, and this is "
            f"{installed.version}. Install one of those, or set VIRTUAL_GPU_ANY_TORCH=1 to see what happens."
        )
    if _find(installed, f"libcudart.so.{installed.cuda_major}") is None:
        return (
            f"a virtual GPU needs the CUDA libraries as wheels, and {installed.wheels} has no libcudart. "
            "Install PyTorch by pip: pip install torch"
        )
    if not any((folder / "crt" / "host_defines.h").exists() for folder in _headers(installed)):
        return "a virtual GPU needs CUDA's headers, which come with triton. Run: pip install triton"
    if _compiler() is None or shutil.which("nm") is None:
        return (
            "a virtual GPU needs a C compiler once, and there is no cc, gcc or clang, or no nm beside it. "
            "Install one (Debian, Ubuntu: apt install gcc libc6-dev), or name it in CC."
        )
    return None


def libraries() -> list[Path]:
    """Paths of the libraries for LD_PRELOAD, all in one folder. Compiles them if they are not in the cache.

    Raises InputError with the reason and the fix where there can be no virtual GPU.
    """
    reason = why_not()
    installed = installed_torch()
    if reason is not None or installed is None:
        raise InputError(reason or "PyTorch is not installed")
    parts = _parts(installed)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "harness" / "virtual-gpu" / _key(installed)
    if not folder.is_dir():
        _build(installed, parts, folder)
    return [folder / name for name in parts]


def _parts(installed: Torch) -> dict[str, tuple[str, ...]]:
    """The C sources of each library, by the library's file name."""
    major = installed.cuda_major
    return {
        f"libcudart.so.{major}": RUNTIME,
        f"libcublas.so.{major}": ("cublas.c",),
        f"libcublasLt.so.{major}": ("cublasLt.c",),
        "libcuda.so.1": ("driver.c",),
        f"libcupti.so.{major}": ("cupti.c",),
        "libnccl.so.2": ("nccl.c",),
        "libnvidia-ml.so.1": ("nvml.c",),
        **{  # whose versions are not CUDA's: CUDA 13 has libcufft.so.12
            path.name: (f"{name}.c",)
            for name in ("cufft", "cusolver", "cusparse")
            for path in sorted(installed.wheels.glob(f"*/lib/lib{name}.so.*"))
        },
        CUDNN: ("cudnn.c",),
    }


def _key(installed: Torch) -> str:
    """The name of the folder in the cache: it differs where anything differs that is compiled or linked."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for source in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(str(installed.wheels).encode())  # another environment may have other patch releases
    return f"torch-{installed.version}-cuda-{installed.cuda_version}-{digest.hexdigest()[:16]}"


def _compiler(variable: str = "CC", *names: str) -> str | None:
    tried = (os.environ.get(variable), *(names or ("cc", "gcc", "clang")))
    return next((found for name in tried if name and (found := shutil.which(name))), None)


def _find(installed: Torch, name: str) -> Path | None:
    """A library of NVIDIA's wheels, which is in nvidia/cu13/lib for CUDA 13 and in nvidia/<package>/lib for
    CUDA 12; None if there is none of that name."""
    return next(iter(sorted(installed.wheels.glob(f"*/lib/{name}"))), None)


def _headers(installed: Torch) -> list[Path]:
    triton = installed.folder.parent / "triton" / "backends" / "nvidia" / "include"
    return [*sorted(installed.wheels.glob("*/include")), triton]


def _build(installed: Torch, parts: dict[str, tuple[str, ...]], folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for killed in folder.parent.glob(f"{_building()}*-*"):  # as its process compiled
            number = killed.name.removeprefix(_building()).partition("-")[0]
            if number.isdecimal() and not Path("/proc", number).exists():
                shutil.rmtree(killed, ignore_errors=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{_building()}{os.getpid()}-", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"cannot write {folder.parent}: {error.strerror}. The virtual GPU's libraries are kept there: "
            "give a folder that can be written in XDG_CACHE_HOME."
        ) from None
    try:
        compilers = {name: _compile(installed, name, sources, unfinished) for name, sources in parts.items()}
        if _compiler("CXX", *CXX) is not None:
            compilers[OPERATORS] = _compile_operators(installed, unfinished)
        for name, process in compilers.items():
            output, _ = process.communicate()
            if process.returncode != 0 and name != OPERATORS:  # without OPERATORS there is only no clock
                raise InputError(
                    f"the virtual GPU's {name} could not be compiled for PyTorch {installed.version} "
                    f"(CUDA {installed.cuda_version}) by {_compiler()}: {output.strip()[-600:]}. Try another "
                    "compiler: CC=gcc."
                )
        for file in unfinished.iterdir():
            if file.name not in compilers:
                file.unlink()
        for name in parts:  # libcuda.so is what Triton links with, and what others open
            if name != CUDNN:
                (unfinished / f"{name.partition('.so')[0]}.so").symlink_to(name)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _building() -> str:
    """The beginning of the names of folders that this machine compiles in; the process number follows."""
    return f".building-{platform.node()}-"


def _compile(installed: Torch, name: str, sources: tuple[str, ...], folder: Path) -> subprocess.Popen[str]:
    """Start compiling one library. Functions that the real library exports and `sources` do not define are
    added: they succeed without an effect."""
    real = _find(installed, name)
    exported: set[str] = exported_functions(real) if real is not None else set()
    if name == "libcuda.so.1":
        exported = _declared(installed)
    functions = sorted(function for function in exported if re.fullmatch(r"[A-Za-z_]\w*", function))
    rest = folder / f"{name}.c"
    rest.write_text(
        "int virtual_gpu_without_effect(const char*);\n"
        "#define WEAK(name) __attribute__((weak)) int name(void) "
        "{ return virtual_gpu_without_effect(#name); }\n"
        + "".join(f"WEAK({function})\n" for function in functions)  # a definition in `sources` goes first
    )
    command = [_compiler() or "cc", "-O2", "-w", "-fno-builtin", "-shared", "-fPIC", "-pthread"]
    command.append("-fno-semantic-interposition")  # they call their own functions
    command.append("-ftls-model=initial-exec")  # all are preloaded: a thread's variables need no call then
    command += [f"-I{path}" for path in (SOURCES, *_headers(installed))]
    command += [*(str(SOURCES / source) for source in sources), str(rest), "-o", str(folder / name)]
    command += [f"-Wl,-soname,{name}", "-Wl,-Bsymbolic"]
    if real is not None:
        versions = folder / f"{name}.versions"
        versions.write_text(f"{name} {{ global: *; }};\n")
        command += [f"-Wl,--version-script={versions}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _compile_operators(installed: Torch, folder: Path) -> subprocess.Popen[str]:
    """Start compiling OPERATORS, which tells the clock what PyTorch runs."""
    torch, include = installed.folder, installed.folder / "include"
    command = [
        _compiler("CXX", *CXX) or "c++",
        "-std=c++20",
        "-DNDEBUG",
        "-O2",
        "-w",
        "-shared",
        "-fPIC",
        "-fno-plt",
    ]
    command.append("-ftls-model=initial-exec")  # a few bytes, for which every thread has room
    command += [f"-I{SOURCES}", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [str(SOURCES / "operators.cpp")]
    command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", str(folder / OPERATORS)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _declared(installed: Torch) -> set[str]:
    """Names of the driver's functions, from its header: the driver itself is in no wheel."""
    header = next(path for folder in _headers(installed) if (path := folder / "cuda.h").exists())
    text = header.read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", text))
    return names | set(re.findall(r"#define\s+cu\w+\s+(cu\w+_v\d)\b", text))
