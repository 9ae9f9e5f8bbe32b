"""Tells the clock (c/clock.c) which tensors a kernel of Triton touches. No operator of PyTorch launches it:
here each launch of Python's happens within one (harness/kernels/triton_kernels.py)."""

import threading

KNOWN = ("liger_kernel",)
"""Packages whose kernels wait for memory alone."""
WAIT_FOR_MEMORY = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
"""What torch.compile calls its kernels that do; others are products, attention, or the program's own."""

_thread = threading.local()
"""`launch`: what the operator that this thread calls is to launch."""
_call = None
"""Calls an operator by name with tensors, the kernel's name and a launch; None before the clock starts."""
_kept = []
"""Libraries, which have to live as long as the process."""


def begin(jit):
    """Describe the kernels that libraries and the program wrote."""
    _describe(jit.JITFunction, lambda kernel: kernel.__module__.startswith(KNOWN), _is_no_launch)


def begin_compiled(triton_heuristics):
    """Describe those that torch.compile makes."""
    _describe(
        triton_heuristics.CachingAutotuner,
        lambda kernel: kernel.heuristic_type.name in WAIT_FOR_MEMORY,
        lambda kernel, options: len(kernel.launchers) != 1,  # it measures several first, or compiles
    )


def _is_no_launch(kernel, options):
    return options.get("warmup")


def _describe(owner, is_known, is_other):
    launched = owner.run

    def run(kernel, *arguments, **options):
        if _call is None or is_other(kernel, options):
            return launched(kernel, *arguments, **options)
        operator = "triton_kernel" if is_known(kernel) else "unknown_triton_kernel"
        given = *arguments, *options.values()
        return _call(operator, given, kernel.fn.__name__, lambda: launched(kernel, *arguments, **options))

    owner.run = run


def start():
    """Describe launches from now on. To be called when the clock starts, and harness can be imported."""
    global _call
    from contextlib import nullcontext

    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from virtual_gpu_keys import KEY, switched
    from virtual_gpu_own_time import following_ns, now

    profilers_hear = torch._C._autograd._enable_record_function

    def launch(touched, name):
        profilers_hear(True)
        began = now()
        _thread.result = _thread.launch()
        _thread.launched_ns = now() - began
        profilers_hear(False)

    library = torch.library.Library("harness", "IMPL")
    _kept.append(library)
    operators = {}
    for name in ("triton_kernel", "unknown_triton_kernel"):
        library.impl(name, launch, "CUDA")
        operators[name] = switched(getattr(torch.ops.harness, name).default, False)

    def call(name, given, kernel, launched):
        touched = [value for value in given if type(value) in (torch.Tensor, torch.nn.Parameter)]
        if not touched or not all(tensor.is_cuda for tensor in touched):
            return launched()
        began = now()
        follows = torch._C._dispatch_tls_is_dispatch_key_included(KEY)
        _thread.launch = switched(launched, follows)
        profilers_hear(False)  # of an operator that no GPU has
        try:
            modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
            with modes, torch._C.DisableTorchFunction():
                operators[name](touched, kernel)
        finally:
            profilers_hear(True)
            _thread.launch = None  # it holds the kernel's tensors
        result, _thread.result = _thread.result, None
        following_ns.value += now() - began - _thread.launched_ns  # on a GPU no program spends this
        return result

    _call = call
