"""Install flash-attn 2 from its source, with kernels that do nothing: no compiler for kernels is needed.

    pip install setuptools wheel packaging ninja einops
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \\
        pip download --no-deps --no-binary :all: --no-build-isolation flash-attn
    python -m tests.stand_in_cuda.flash_attn flash_attn-2.8.3.post2.tar.gz

On the stand-in the package's own C++ then asks the allocator for what it asks on a GPU. It goes where this
Python's packages are: use an environment of its own. Needs g++ and CUDA's headers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

HERE = Path(__file__).parent
EXTENSION = "flash_attn_2_cuda"


def compile_extension(source: Path, cuda: Path, out: Path) -> None:
    """flash_api.cpp of the unpacked `source`, with the kernels of this folder."""
    csrc = source / "csrc"
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "include"
    headers = [csrc / "flash_attn", csrc / "flash_attn" / "src", csrc / "cutlass" / "include", wheels, cuda]
    headers += [Path(path) for path in (*include_paths(), sysconfig.get_path("include"))]
    libraries = ("torch", "torch_cpu", "torch_cuda", "torch_python", "c10", "c10_cuda")
    subprocess.run(
        [
            *("g++", "-O1", "-w", "-fPIC", "-shared", "-std=c++20", f"-DTORCH_EXTENSION_NAME={EXTENSION}"),
            *(f"-I{path}" for path in headers),
            *(csrc / "flash_attn" / "flash_api.cpp", HERE / "flash_attn_kernels.cpp"),
            f"-L{Path(torch.__file__).parent / 'lib'}",
            *(f"-l{name}" for name in libraries),
            *("-o", out),
        ],
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.stand_in_cuda.flash_attn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sdist", type=Path, help="flash-attn's source distribution, a .tar.gz")
    parser.add_argument("--cuda", type=Path, default=Path("/usr/local/cuda/include"), help="CUDA's headers")
    options = parser.parse_args()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    without_kernels = os.environ | {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    subprocess.run([*pip, options.sdist], env=without_kernels, check=True)
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(options.sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (source,) = Path(unpacked).iterdir()
        compile_extension(source, options.cuda, Path(sysconfig.get_path("purelib")) / f"{EXTENSION}.so")


if __name__ == "__main__":
    main()
