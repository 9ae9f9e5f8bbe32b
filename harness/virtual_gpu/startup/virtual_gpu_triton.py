"""Tells the clock (c/clock.c) which tensors a kernel of Triton touches. No operator of PyTorch launches it:
here each launch of Python's happens within one (harness/kernels/triton_kernels.py)."""

import threading

KNOWN = ("liger_kernel",)
"""Packages whose kernels wait for memory alone."""
WAIT_FOR_MEMORY = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION")
"""What torch.compile calls its kernels that do; others are products, attention, or the program's own."""
QUERY, KEY, VALUE, GRADIENT = "arg_Q", "arg_K", "arg_V", "arg_DO"
"""Arguments of flex attention's kernels (torch/_inductor/kernel/flex); backward alone has a gradient."""
BLOCKS, PARTLY, WHOLLY = "arg_KV_IDX", "arg_KV_NUM_BLKS", "arg_FULL_KV_NUM_BLKS"
"""For each row of blocks of scores: which ones its mask leaves, and how many, partly and wholly."""

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
        names = getattr(kernel.fn, "arg_names", ())
        named = dict(zip(names, arguments, strict=False)) if PARTLY in names else None
        return _call(
            operator, given, kernel.fn.__name__, lambda: launched(kernel, *arguments, **options), named
        )

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

    def launch(*_):
        profilers_hear(True)
        began = now()
        _thread.result = _thread.launch()
        _thread.launched_ns = now() - began
        profilers_hear(False)

    library = torch.library.Library("harness", "IMPL")
    _kept.append(library)
    operators = {}
    for name in ("triton_kernel", "unknown_triton_kernel", "flex_attention", "flex_attention_backward"):
        library.impl(name, launch, "CUDA")
        operators[name] = switched(getattr(torch.ops.harness, name).default, False)

    def call(name, given, kernel, launched, of_attention):
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
                if of_attention is None:
                    operators[name](touched, kernel)
                else:
                    name = "flex_attention_backward" if GRADIENT in of_attention else "flex_attention"
                    operators[name](*_inputs(of_attention, touched), seen(of_attention), kernel)
        finally:
            profilers_hear(True)
            _thread.launch = None  # it holds the kernel's tensors
        result, _thread.result = _thread.result, None
        following_ns.value += now() - began - _thread.launched_ns  # on a GPU no program spends this
        return result

    seen = switched(_seen, False)
    _call = call


def _inputs(named, touched):
    inputs = [named[name] for name in (QUERY, KEY, VALUE)]
    return *inputs, [tensor for tensor in touched if all(tensor is not each for each in inputs)]


def _seen(named):
    """The length of a causal sequence of which as many blocks of scores are computed, which is half of it and
    half a block for a row of blocks. A mask whose values nobody knows is taken for causal."""
    from virtual_gpu_held import is_held, is_plain, values_of

    keys = named[KEY].shape[2]
    counts = [named[name] for name in (PARTLY, WHOLLY) if name in named]
    if not all(is_plain(each) and is_held(each) for each in counts):
        return keys
    block = -(-keys // named[BLOCKS].shape[-1])
    in_a_row = sum(values_of(each).double().mean().item() for each in counts)
    return max(1, round(block * (2 * in_a_row - 1)))
