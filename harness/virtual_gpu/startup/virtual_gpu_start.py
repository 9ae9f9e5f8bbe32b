"""Prepares torch in a process on a virtual GPU. sitecustomize.py calls each `begin...` function with a module
of torch, right after that module was executed."""

import atexit
import ctypes
import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_VALUES = os.environ.get("VIRTUAL_GPU_VALUES") == "1"
_has_begun = False
_kept = []
"""Objects that have to live as long as the process."""


def begin(torch):
    """Prepare torch: the clock and the recording start with the first use of a device, values at once."""
    global _has_begun
    if os.environ.get("VIRTUAL_GPU_USED"):
        torch.cuda._lazy_call(_say_it_is_used)
    if os.environ.get("VIRTUAL_GPU_CLOCK") == "1":
        torch.cuda._lazy_call(lambda: _install("virtual_gpu_clock"))
    torch.cuda._lazy_call(lambda: atexit.register(_warn_of_work_spaces))
    if os.environ.get("VIRTUAL_GPU_OUT"):
        _install("virtual_gpu_out")
    if _VALUES:
        _install("virtual_gpu_values")
    _kept.append(torch.library.Library("aten", "IMPL"))  # what it registers ends with it
    _kept[0].impl("_linalg_check_errors", _succeed, "CUDA")
    _has_begun = True
    if "torch.distributed.distributed_c10d" in sys.modules:
        begin_distributed(None)


def _succeed(info, *_, **__):
    """In the place of `_linalg_check_errors`: a decomposition that nobody computed has no errors. The check's
    own allocations are made all the same."""
    info.any()


def _say_it_is_used():
    try:
        with open(os.environ["VIRTUAL_GPU_USED"], "ab") as place:
            place.write(b"1")
    except OSError:  # the command's own process has ended
        pass


def _warn_of_work_spaces():
    """Say, as the process ends, for which libraries the size of work spaces was guessed, and how often."""
    sentences = (
        "cuFFT ({} plans, with the least that NVIDIA documents)",
        "cuSOLVER ({} calls, with what LAPACK takes)",
        "cuSPARSE ({} calls, with none)",
    )
    counts = (ctypes.c_int * 3).in_dll(ctypes.CDLL(None), "virtual_gpu_asked")
    if any(counts):
        pairs = zip(sentences, counts, strict=True)
        libraries = ", ".join(sentence.format(count) for sentence, count in pairs if count)
        print(
            f"virtual GPU: a card may need more memory: nobody documents the work spaces of {libraries}.",
            file=sys.stderr,
        )


def begin_distributed(distributed_c10d):
    if not _has_begun:  # torch itself is still being imported, and `begin` will call this
        return
    from torch._C._distributed_c10d import ProcessGroupNCCL, _SymmetricMemory

    for name in ("empty_strided_p2p", "rendezvous", "set_backend", "get_mempool_allocator"):
        setattr(_SymmetricMemory, name, staticmethod(_refuse_symmetric_memory))
    ProcessGroupNCCL.mem_allocator = property(_refuse_symmetric_memory)
    if os.environ.get("VIRTUAL_GPU_ALONE") == "1":
        _install("virtual_gpu_alone")
    if _VALUES:
        _install("virtual_gpu_collectives")


def _refuse_symmetric_memory(*_, **__):
    raise RuntimeError(
        "a virtual GPU has no symmetric memory: it lies on several GPUs at once, for kernels, and none runs "
        "here. Run the program without it (asynchronous tensor parallelism uses it, for one)."
    )


def _install(name):
    """Import a file of this folder and call its `install`."""
    sys.path.insert(0, _HERE)
    try:
        file = importlib.import_module(name)
    finally:
        sys.path.remove(_HERE)
    file.install()
