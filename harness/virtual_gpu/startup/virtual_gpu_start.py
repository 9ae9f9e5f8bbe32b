"""What happens in a process on a virtual GPU once it has imported torch, and once it begins to compile."""

import atexit
import ctypes
import importlib
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_VALUES = os.environ.get("VIRTUAL_GPU_VALUES") == "1"
_has_begun = False
_kept = []


def begin(torch):
    global _has_begun
    if os.environ.get("VIRTUAL_GPU_USED"):
        torch.cuda._lazy_call(_say_it_is_used)
    if os.environ.get("VIRTUAL_GPU_CLOCK") == "1":
        torch.cuda._lazy_call(_start_clock)
    torch.cuda._lazy_call(lambda: atexit.register(_tell_of_work_spaces))
    if os.environ.get("VIRTUAL_GPU_OUT"):
        _install("virtual_gpu_out")
    if _VALUES:
        _install("virtual_gpu_values")
    _kept.append(torch.library.Library("aten", "IMPL"))  # what is registered goes with it
    _kept[0].impl("_linalg_check_errors", _succeed, "CUDA")
    _has_begun = True
    if "torch.distributed.distributed_c10d" in sys.modules:
        begin_distributed(None)


def _succeed(info, *_, **__):
    """Decompositions of matrices that nobody computes succeed: what takes memory of the check stays."""
    info.any()


def _say_it_is_used():
    try:
        with open(os.environ["VIRTUAL_GPU_USED"], "ab") as place:
            place.write(b"1")
    except OSError:  # the command's own process has ended
        pass


def _tell_of_work_spaces():
    counted = (
        "cuFFT ({} plans, with the least that NVIDIA documents)",
        "cuSOLVER ({} calls, with what LAPACK takes)",
        "cuSPARSE ({} calls, with none)",
    )
    asked = (ctypes.c_int * 3).in_dll(ctypes.CDLL(None), "virtual_gpu_asked")
    if any(asked):
        told = ", ".join(text.format(calls) for text, calls in zip(counted, asked, strict=True) if calls)
        print(
            f"virtual GPU: a card may need more memory: nobody documents the work spaces of {told}.",
            file=sys.stderr,
        )


def _start_clock():
    _install("virtual_gpu_clock")


def begin_to_compile(output_graph):
    import virtual_gpu_values

    virtual_gpu_values.compile_without(output_graph)


def begin_to_save(default_planner):
    _imported("virtual_gpu_alone").save_own_part(default_planner)


def begin_a_pipeline(stage):
    _imported("virtual_gpu_alone").answer_a_stage(stage)


def begin_to_load(modeling_utils):
    _imported("virtual_gpu_weights").begin_to_load(modeling_utils)


def begin_to_fetch(hub):
    _imported("virtual_gpu_weights").begin_to_fetch(hub)


def begin_distributed(distributed_c10d):
    if not _has_begun:  # torch is still being imported: `begin` comes
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
    _imported(name).install()


def _imported(name):
    sys.path.insert(0, _HERE)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(_HERE)
