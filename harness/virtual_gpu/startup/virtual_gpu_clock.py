"""Estimates how long a virtual GPU's kernels take, for its clock (c/clock.c), from harness' roofline.

The clock asks once for each description: of an operator of PyTorch with its shapes (c/operators.cpp), or of
work that no operator launched (a product, a collective, another library's kernel). This needs harness; where
this interpreter cannot import it, the device has no clock, and a sentence says so.
"""

import ctypes
import os
import sys

import torch
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from virtual_gpu_keys import switched
from virtual_gpu_times import Operation, Times
from virtual_gpu_triton import start as describe_triton

_C = ctypes.CDLL(None)


_Reference = ctypes.POINTER(Operation)
_STARTER = ctypes.CFUNCTYPE(None)
_ESTIMATOR = ctypes.CFUNCTYPE(None, _Reference)
_OPERATOR_ESTIMATOR = ctypes.CFUNCTYPE(None, _Reference, ctypes.c_char_p, ctypes.c_char_p)
_C.virtual_gpu_estimated.argtypes = [
    _Reference,
    ctypes.c_int64,
    ctypes.c_char_p,
    ctypes.c_double,
    ctypes.c_int,
]
_C.virtual_gpu_estimated.restype = None
_C.virtual_gpu_cached.argtypes = [_Reference, ctypes.c_int64, ctypes.c_int64, ctypes.c_char_p]
_C.virtual_gpu_cached.restype = None
_C.virtual_gpu_set_cache.argtypes = [ctypes.c_double, ctypes.c_double]
_C.virtual_gpu_set_cache.restype = None
_C.virtual_gpu_start_clock.argtypes = [_ESTIMATOR, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]
_C.virtual_gpu_start_clock.restype = None
_C.virtual_gpu_is_timed.restype = None
LAUNCH_NS = 4000
"""Nanoseconds from the host's call to the beginning of the kernel, on a device without other work."""
_kept = []
"""Functions that C calls: they have to live as long as the process."""
_said = set()
"""Names of the operators for which it was said that no time can be estimated."""


def install():
    """Have the clock start once a time is asked for: by an event with timing, a profiler, or the first step
    of an optimizer. To be called once, when the process begins to use a device."""
    starter = _STARTER(_start)
    _kept.append(starter)
    _C.virtual_gpu_start_when_timed(starter)
    # it is never removed: PyTorch iterates over the hooks while this one runs
    register_optimizer_step_pre_hook(lambda *_: _C.virtual_gpu_is_timed())


def _start():
    estimates = _estimates()
    if estimates is None:
        return
    library = os.path.join(os.environ["VIRTUAL_GPU_LIBRARIES"], "libvirtual_gpu_operators.so")
    if not os.path.exists(library):
        print(
            "virtual GPU: the device has no clock: either there was no C++ compiler (Debian, Ubuntu: apt "
            "install g++), or it does not compile PyTorch's headers. Times are not estimated.",
            file=sys.stderr,
        )
        return
    direct = _ESTIMATOR(_guarded(lambda what: estimates.alone(what.contents.description.decode())))
    of_operator = _OPERATOR_ESTIMATOR(_guarded(lambda *request: _estimate_operator(estimates, *request)))
    _kept.extend((direct, of_operator))
    bare_ns = round(estimates.bare_s * 1e9)
    _C.virtual_gpu_set_cache(*estimates.cache_room)
    _C.virtual_gpu_start_clock(direct, LAUNCH_NS, bare_ns, estimates.link_bytes_per_s)
    describe_triton()  # before operators are watched: what launches becomes one
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL).virtual_gpu_watch_operators(of_operator)
    Times(estimates).watch()
    if "virtual_gpu_own_time" in sys.modules:  # values are followed
        with _disable_current_modes():
            sys.modules["virtual_gpu_own_time"].measure_the_crossing()


def _estimates():
    """harness' estimates for this device; None, after a sentence, where this interpreter has no harness."""
    sys.path.append(os.environ["VIRTUAL_GPU_HARNESS"])
    try:
        from harness.hardware import GPUS_PER_NODE, find_hardware
        from harness.kernels import Described
    except ImportError as error:
        print(
            f"virtual GPU: the device has no clock, because this Python cannot import harness ({error}). "
            "Times are not estimated.",
            file=sys.stderr,
        )
        return None
    finally:
        sys.path.remove(os.environ["VIRTUAL_GPU_HARNESS"])
    in_node = max(GPUS_PER_NODE, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return Described(find_hardware(os.environ["VIRTUAL_GPU"]), in_node)


def _guarded(function):
    """`function` as C calls it: its estimate goes to the clock. An error in it never reaches the program; the
    kernels count as unknown then."""
    function = switched(function, False)  # values of what it computes on shapes are not followed

    def call(what, *details):
        compiler = set_eval_frame(None)  # the program's own, as are modes
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                estimate = function(what, *details)
        except Exception as error:
            _say_once(what.contents.name.decode(), error)
            return
        finally:
            set_eval_frame(compiler)
        took_ns, its_class = round(estimate.seconds * 1e9), estimate.kernel_class.encode()
        if estimate.accesses:
            held_ns, missed_ns = round(estimate.held_s * 1e9), round(estimate.missed_s * 1e9)
            _C.virtual_gpu_cached(what, held_ns, missed_ns, estimate.accesses.encode())
        what.contents.at_limit = round(estimate.at_limit * 100)
        _C.virtual_gpu_estimated(what, took_ns, its_class, estimate.flops, estimate.is_unknown)

    return call


def _estimate_operator(estimates, what, inputs, products):
    """`what`: a pointer to the Operation; `inputs`: its arguments, in JSON; `products`: the matrix products
    that its kernels asked of cuBLAS, "bf16 m n k batch;" each."""
    name = what.contents.description.partition(b" ")[0].decode()
    return estimates.operator(name, inputs.decode(), products.decode())


def _say_once(name, error):
    if name not in _said:
        _said.add(name)
        print(f"virtual GPU: {name}: no time can be estimated ({error}).", file=sys.stderr)
