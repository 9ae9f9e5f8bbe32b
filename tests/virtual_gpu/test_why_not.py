"""The virtual GPU without PyTorch's CUDA build: what it says where there can be none, and what it is made
of."""

import ctypes
import sys
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.hardware import find_hardware, hardware_names
from harness.virtual_gpu import Options, build, emulated_device, surroundings
from harness.virtual_gpu.build import exported_functions
from harness.virtual_gpu.device import COMPILED_FOR, device_variables


def torch_in(folder: Path, version: str, cuda: str | None) -> build.Torch:
    return build.Torch(folder / "torch", version, cuda)


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.platform, "system", lambda: "Linux")
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("version", "cuda", "says"),
    [
        ("2.13.0+cpu", None, "pip install 'torch===2.13.0'"),
        ("2.10.1", "13.0", "tried with PyTorch 2.11 to 2.15, and this is 2.10.1"),
        ("2.13.0+cu130", "13.0", "Install PyTorch by pip"),
    ],
)
def test_why_there_is_none(
    linux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, cuda: str | None, says: str
) -> None:
    monkeypatch.setattr(build, "installed_torch", lambda: torch_in(tmp_path, version, cuda))
    assert says in str(build.why_not())
    with pytest.raises(InputError, match="virtual GPU"):
        build.libraries()


def test_another_system_and_no_compiler(linux, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("nvidia/cu13/lib/libcudart.so.13", "triton/backends/nvidia/include/crt/host_defines.h"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(build, "installed_torch", lambda: torch_in(tmp_path, "2.13.0", "13.0"))
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    assert "apt install gcc" in str(build.why_not())
    monkeypatch.setattr(build.platform, "system", lambda: "Darwin")
    assert "needs Linux on x86-64, and this is Darwin" in str(build.why_not())


@pytest.mark.parametrize("name", hardware_names())
def test_every_device_of_the_table_can_be_virtual(name: str) -> None:
    there = device_variables(name, 2)
    assert 0 < int(there["VIRTUAL_GPU_CAPACITY"]) < int(there["VIRTUAL_GPU_TOTAL"])
    assert int(there["VIRTUAL_GPU_BINARY"]) in COMPILED_FOR
    assert int(there["VIRTUAL_GPU_SHARED"]) >= 64 << 10
    assert there["VIRTUAL_GPU_PROCESSORS"] == str(find_hardware(name).sm_count)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options("h100", gpus=0), "--gpus 0"),
        (Options("h100", world_size=4, rank=4), "ranks count from 0"),
        (Options("h100", rank=3), "Give --world-size too"),
        (Options("h100", world_size=0), "--world-size 0: there is at least one rank"),
        (Options("h1000"), "there is no h1000 in the table"),
    ],
)
def test_options_that_cannot_be(options: Options, says: str) -> None:
    with pytest.raises(InputError, match=says):
        surroundings(options, {})


def test_this_process_is_on_none() -> None:
    assert emulated_device() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads a Linux library")
def test_the_functions_of_a_library() -> None:
    """Those that it defines: neither data nor what it takes from others. This is a small one of PyTorch's."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libshm.so"
    names = exported_functions(library)
    loaded = ctypes.CDLL(str(library))
    assert all(hasattr(loaded, name) for name in names)
    data, of_others = "_ZTV21THManagedMapAllocator", "_Unwind_Resume"
    assert hasattr(loaded, data)
    assert hasattr(loaded, of_others)
    assert names.isdisjoint({data, of_others})
    assert "_Z11libshm_initPKc" in names
