"""What the kernels of a virtual GPU take, for its clock (c/clock.c): harness estimates it from what each
operator is given, once for each description.

The clock asks here: for an operator of PyTorch with its shapes (c/operators.cpp), and for what is put on a
stream by itself: products, collectives, kernels of others. It needs harness; where this interpreter cannot
import it, the device has no clock, and this is said.
"""

import ctypes
import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from virtual_gpu_times import Operation, Times

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
_C.virtual_gpu_start_clock.argtypes = [_ESTIMATOR, ctypes.c_int64, ctypes.c_int64, ctypes.c_double]
_C.virtual_gpu_start_clock.restype = None
_C.virtual_gpu_is_timed.restype = None
LAUNCH_NS = 4000
"""From the host's call to the beginning of the kernel on a device that has nothing else to do."""
_kept = []
_said = set()


def install():
    """Start the clock once somebody wants to know a time: by an event that has one, a profiler, or a step of
    an optimizer. To be called once, when the process begins to use a device."""
    starter = _STARTER(_start)
    _kept.append(starter)
    _C.virtual_gpu_start_when_timed(starter)
    # it stays: PyTorch goes through the hooks of all optimizers while this one runs, and none may leave then
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
    direct = _ESTIMATOR(_guarded(lambda what: _estimate(estimates, what)))
    of_operator = _OPERATOR_ESTIMATOR(_guarded(lambda *asked: _estimate_operator(estimates, *asked)))
    _kept.extend((direct, of_operator))
    bare_ns = round(estimates.bare_s * 1e9)
    _C.virtual_gpu_start_clock(direct, LAUNCH_NS, bare_ns, estimates.link_bytes_per_s)
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL).virtual_gpu_watch_operators(of_operator)
    Times(estimates.hardware).watch()


def _estimates():
    """harness' estimates for this device; None where they cannot be had."""
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
    """What goes wrong in an estimate never reaches the program: the kernels count as unknown."""

    def call(what, *asked):
        try:
            found = _undisturbed(function, what, *asked)
        except Exception as error:
            _say_once(what.contents.name.decode(), error)
            return
        took_ns, its_class = round(found.seconds * 1e9), found.kernel_class.encode()
        _C.virtual_gpu_estimated(what, took_ns, its_class, found.flops, found.is_unknown)

    return call


def _undisturbed(function, *asked):
    """Without the modes of the program, and without the values of this device."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return function(*asked)


def _estimate(estimates, what):
    return estimates.alone(what.contents.description.decode())


def _estimate_operator(estimates, what, inputs, products):
    name = what.contents.description.partition(b" ")[0].decode()
    return estimates.operator(name, inputs.decode(), products.decode())


def _say_once(name, error):
    if name not in _said:
        _said.add(name)
        print(f"virtual GPU: {name}: no time can be estimated ({error}).", file=sys.stderr)
