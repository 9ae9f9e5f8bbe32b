"""Install flash-attn from its source, with kernels that do nothing: no compiler for kernels is needed.

    pip install setuptools wheel packaging ninja einops
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \\
        pip download --no-deps --no-binary :all: --no-build-isolation flash-attn
    git clone https://github.com/Dao-AILab/flash-attention
    python -m benchmarks.virtual_gpu.flash_attn flash_attn-2.8.3.post2.tar.gz \\
        --version-3 flash-attention/hopper

On a virtual GPU the packages' own C++ then asks the allocator for what it asks on a GPU. They go where this
Python's packages are: use an environment of its own. Needs g++ and CUDA's headers.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

from benchmarks.command import parser_of

HERE = Path(__file__).parent
HEADERS = Path("/usr/local/cuda/include")
WHEELS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13"
PACKAGES = Path(sysconfig.get_path("purelib"))
VERSION_3 = "flash_attn_3", "3.0.0"


def compile_extension(source: Path, headers: list[Path], cuda: Path, out: Path) -> None:
    """`source`, a file of this folder, as an extension of Python."""
    everywhere = (*headers, WHEELS / "include", cuda)
    libraries = ("torch", "torch_cpu", "torch_cuda", "torch_python", "c10", "c10_cuda")
    subprocess.run(
        [
            *("g++", "-O1", "-w", "-fPIC", "-shared", "-std=c++20", f"-DTORCH_EXTENSION_NAME={out.stem}"),
            *(f"-I{path}" for path in (*everywhere, *include_paths(), sysconfig.get_path("include"))),
            source,
            f"-L{Path(torch.__file__).parent / 'lib'}",
            *(f"-l{name}" for name in libraries),
            *("-o", out),
        ],
        check=True,
    )


def install_2(sdist: Path) -> None:
    """Its Python files."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    without_kernels = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*pip, sdist], env=without_kernels, check=True)


def install_3(hopper: Path) -> None:
    """Its Python files, and that the package has them: transformers asks for the module and the package."""
    name, version = VERSION_3
    (PACKAGES / name).mkdir(exist_ok=True)
    for module in ("flash_attn_interface.py", "flash_attn_config.py"):
        where = hopper if (hopper / module).exists() else hopper / name
        shutil.copyfile(where / module, PACKAGES / module)
    about = PACKAGES / f"{name}-{version}.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (about / "top_level.txt").write_text(f"{name}\nflash_attn_interface\n")


def main() -> None:
    parser = parser_of("benchmarks.virtual_gpu.flash_attn", __doc__)
    parser.add_argument("sdist", type=Path, help="source distribution of version 2, a .tar.gz")
    parser.add_argument("--version-3", type=Path, metavar="HOPPER", help="install version 3 too, from there")
    parser.add_argument("--cuda", type=Path, default=HEADERS, help="CUDA's headers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(options.sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        csrc = source / "csrc"
        cutlass = csrc / "cutlass" / "include"
        install_2(options.sdist)
        headers = [csrc / "flash_attn", csrc / "flash_attn" / "src", cutlass]
        out = PACKAGES / "flash_attn_2_cuda.so"
        compile_extension(HERE / "flash_attn_2.cpp", headers, options.cuda, out)
        if options.version_3 is not None:
            install_3(options.version_3)
            out = PACKAGES / VERSION_3[0] / "_C.so"
            compile_extension(HERE / "flash_attn_3.cpp", [options.version_3, cutlass], options.cuda, out)


if __name__ == "__main__":
    main()
