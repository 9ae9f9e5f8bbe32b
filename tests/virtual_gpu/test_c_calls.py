"""What programs get who call the runtime, the driver or NVML themselves, in the words of NVIDIA's manuals."""

import sys

import pytest

pytestmark = pytest.mark.virtual_gpu

CALL = """
import ctypes, torch
C = ctypes.CDLL(None)
size, pointer = ctypes.c_size_t, ctypes.c_void_p
torch.ones(1, device="cuda")
"""


def test_threads_that_take_pinned_memory_at_once(emulate) -> None:
    """Each of what they took is known as pinned, and its like are told apart."""
    code = """
import threading
class Attributes(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("rest", pointer * 16)]
def type_of(address):
    found = Attributes()
    C.cudaPointerGetAttributes(ctypes.byref(found), pointer(address))
    return found.type
def take():
    for _ in range(1000):
        made = pointer()
        C.cudaHostAlloc(ctypes.byref(made), size(4096), 0)
        taken.append(made.value)
taken = []
threads = [threading.Thread(target=take) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(len(taken), {type_of(address) for address in taken})
ours = torch.ones(4096)
print(ours.is_pinned(), C.cudaHostRegister(pointer(ours.data_ptr()), size(4 * 4096), 0), ours.is_pinned())
print(C.cudaHostUnregister(pointer(ours.data_ptr())), ours.is_pinned())
"""
    printed = emulate(code=CALL + code).stdout.splitlines()
    assert printed == ["8000 {1}", "False 0 True", "0 False"]


def test_sizes_and_pointers_that_cannot_be(emulate) -> None:
    """Nothing is asked for, more than there is in any computer, and memory of somebody else: an error, no
    crash."""
    code = """
made = pointer(1)
print(C.cudaMalloc(ctypes.byref(made), size(0)), made.value)
print(C.cudaMalloc(ctypes.byref(made), size(2**64 - 1)), made.value)
print(C.cudaFree(pointer(0)), C.cudaFree(pointer(12345)), C.cudaFreeHost(pointer(12345)))
print(C.cudaMallocManaged(ctypes.byref(made), size(4096), 1), C.cudaFree(made), C.cudaFree(made))
try:
    torch.empty(1 << 47, dtype=torch.uint8, pin_memory=True)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    printed = emulate(code=CALL + code).stdout.splitlines()
    assert printed == ["0 None", "2 None", "0 1 1", "0 0 1", "CUDA error: out of memory"]


def test_addresses_are_those_of_a_driver(emulate) -> None:
    """Regions of 32 MiB downwards, and what is left of the lowest first (harness/allocator/addresses.py)."""
    code = """
mib = 1 << 20
made = [torch.empty(size * mib, dtype=torch.uint8, device="cuda") for size in (40, 40, 24, 24)]
first, second, third, fourth = (tensor.data_ptr() for tensor in made)
print((first - second) // mib, (third - second) // mib, (fourth - first) // mib)
del made[1]
torch.cuda.empty_cache()
print(torch.empty(36 * mib, dtype=torch.uint8, device="cuda").data_ptr() == second)
"""
    assert emulate(code=CALL + code).stdout == "64 40 40\nTrue\n"


def test_addresses_end_before_the_values_of_the_first(emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that gives its memory back each step comes round after 32 TiB, and not over what it has."""
    monkeypatch.setenv("VIRTUAL_GPU_ADDRESSES", "up")
    monkeypatch.setenv("VIRTUAL_GPU_FIRST", str(0x2FFF00000000))
    code = """
kept = torch.arange(1 << 20, device="cuda")
first = torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
places = set()
for _ in range(3):
    big = torch.empty(40 << 30, dtype=torch.uint8, device="cuda")
    places.add(big.data_ptr())
    del big
    torch.cuda.empty_cache()
print(max(places) + (40 << 30) <= 0x300000000000, len(places))
new = torch.arange(1 << 20, device="cuda")
print(new.sum().item() == kept.sum().item() == sum(range(1 << 20)))
print(abs(new.data_ptr() - kept.data_ptr()) >= 8 << 20)
"""
    assert emulate(code=CALL + code).stdout == "True 3\nTrue\nTrue\n"


def test_what_no_kernel_computed_is_zeros_on_the_host(emulate) -> None:
    """Whatever was in the host's memory before; and memory that nobody has written takes none."""
    code = """
import resource
rss = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for elements in (2, 1000, 1 << 18, (1 << 20) + 5):
    old = torch.full((elements + 1,), float("nan"))
    old[1:].copy_(torch.randn(elements, device="cuda").exp())
    print(int(old.isnan().sum()), float(old[1:].abs().sum()))
del old
before = rss()
weights = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").cpu()
print(rss() - before < 16 << 20, int(weights[::4096].count_nonzero()))
"""
    assert emulate(code=CALL + code).stdout.splitlines() == ["1 0.0"] * 4 + ["True 0"]


def test_a_bool_that_no_kernel_computed(emulate) -> None:
    """False after torch.any alone, whose kernel's name others end with."""
    code = """
a = torch.zeros(4, device="cuda")
print(a.any().item(), a.all().item(), torch.logical_or(a[:1], a[:1]).item())
"""
    assert emulate(code=CALL + code, options=("--no-values",)).stdout == "False True True\n"


def test_nvml_s_first_answer_is_no_longer_than_its_structure(emulate) -> None:
    code = """
device, count, room = pointer(), ctypes.c_uint(1), (ctypes.c_uint64 * 4)(*[7] * 4)
C.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
C.nvmlDeviceGetComputeRunningProcesses(device, ctypes.byref(count), room)
import os
print(room[0] & 0xFFFFFFFF == os.getpid(), room[1] > 0, room[2:])
print(C.nvmlDeviceGetHandleByIndex_v2(5, ctypes.byref(device)))  # NVML_ERROR_INVALID_ARGUMENT
print(C.nvmlDeviceGetHandleByUUID(b"GPU-none", ctypes.byref(device)))  # NVML_ERROR_NOT_FOUND
"""
    assert emulate(code=CALL + code).stdout == "True True [7, 7]\n2\n6\n"


def test_an_identifier_that_is_no_device_s(emulate) -> None:
    code = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-none"
import ctypes
count = ctypes.c_int()
ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
print(count.value)
"""
    assert emulate(code=code).stdout == "0\n"


def test_the_driver_s_answers_about_a_pointer(emulate) -> None:
    """Each as large as it is; memory of the host that is not pinned is an error, as Triton expects."""
    code = """
two, there = (ctypes.c_int * 2)(7, 7), torch.ones(4, device="cuda")
address = ctypes.c_uint64
print(C.cuPointerGetAttribute(two, 2, address(there.data_ptr())), list(two))
print(C.cuPointerGetAttribute(two, 9, address(there.data_ptr())), list(two))
print(C.cuPointerGetAttribute(two, 3, address(torch.ones(4).data_ptr())), list(two))
function, status = pointer(99), ctypes.c_int(7)
print(C.cuGetProcAddress_v2(b"cuInit", ctypes.byref(function), 12000, size(0), ctypes.byref(status)))
print(function.value, status.value)
"""
    printed = emulate(code=CALL + code).stdout.splitlines()
    assert printed == ["0 [2, 7]", "0 [0, 7]", "1 [0, 7]", "0", "None 1"]


def test_ranks_that_are_left_out_of_a_communicator(emulate) -> None:
    code = """
comms, made, number, devices = (pointer * 4)(), pointer(), ctypes.c_int(), (ctypes.c_int * 4)()
C.ncclCommInitAll(comms, 4, devices)
for rank in (0, 3):
    C.ncclCommShrink(pointer(comms[rank]), (ctypes.c_int * 2)(1, 2), 2, ctypes.byref(made), None, 0)
    for ask in (C.ncclCommCount, C.ncclCommUserRank):
        ask(made, ctypes.byref(number))
        print(number.value)
"""
    assert emulate(code=CALL + code).stdout.split() == ["2", "0", "2", "1"]


def test_nvidia_s_own_bindings_are_named(emulate) -> None:
    """They bring a runtime of their own: no function of it is found, and the reason is said."""
    pytest.importorskip("cuda.bindings.runtime")
    code = """
from cuda.bindings import driver, runtime
print(runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess)
try:
    driver.cuInit(0)
except RuntimeError:
    print("not found")
"""
    done = emulate(code=CALL + code)
    assert done.stdout == "False\nnot found\n"
    assert done.stderr.count("cuda/bindings cannot be replaced") == 1


def test_a_tensor_of_the_cpu_given_to_triton(emulate, tmp_path) -> None:
    (tmp_path / "kernel.py").write_text("""
import torch, triton
import triton.language as tl

@triton.jit
def double(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, tl.load(x + at) * 2)

double[(1,)](torch.ones(16, device="cuda"), 16)
try:
    double[(1,)](torch.ones(16), 16)
except ValueError as error:
    print(error)
""")
    assert "cpu tensor?" in emulate(sys.executable, "kernel.py").stdout


def test_what_lies_in_several_processes_is_refused(emulate) -> None:
    code = """
try:
    torch.ones(4, device="cuda").untyped_storage()._share_cuda_()
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    done = emulate(code=CALL + code)
    assert done.stdout == "CUDA error: operation not supported\n"
    assert "cannot be given to another process here" in done.stderr


def test_the_driver_s_own_pool_is_refused(emulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch would say that nothing is allocated."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    error = emulate(code="import torch; torch.ones(1, device='cuda')", status=1).stderr
    assert "virtual GPU: the driver's own pool of memory (backend:cudaMallocAsync) is not here" in error


def test_a_stream_that_captures_begins_no_other_capture(emulate) -> None:
    code = """
stream = pointer()
C.cudaStreamCreate(ctypes.byref(stream))
print([C.cudaStreamBeginCapture(stream, 2) for _ in range(2)])  # cudaErrorIllegalState
print(C.cudaStreamEndCapture(stream, ctypes.byref(pointer())))
"""
    assert emulate(code=CALL + code).stdout == "[0, 401]\n0\n"
