"""Which blocks of scores a mask of flex attention leaves, where a compiled function makes the mask: what its
kernels would write nobody knows. What a mask looks at is known where it follows from the host's data, and so
is what PyTorch's own code makes of it on the CPU."""

import functools
import inspect
import types

MOST_SCORES = 1 << 26
"""No larger mask is made on the CPU: a row of 8192 tokens has as many scores."""


class _UnknownError(Exception):
    """A mask looks at a tensor whose values nobody knows."""


def begin(flex_attention):
    """Have a compiled create_block_mask write what is known into the mask that it makes."""
    import torch

    compile_ = torch.compile
    made = flex_attention.create_block_mask
    signature = inspect.signature(made)

    def compiled(model=None, *given, **options):
        function = compile_(model, *given, **options)
        if model is not made:
            return function

        def create_block_mask(*arguments, **named):
            mask = function(*arguments, **named)
            asked = signature.bind(*arguments, **named).arguments | {"device": "cpu"}
            if (asked["B"] or 1) * (asked["H"] or 1) * asked["Q_LEN"] * asked["KV_LEN"] <= MOST_SCORES:
                mask_mod = asked.pop("mask_mod")
                _write(mask, mask_mod, lambda on_cpu: made(on_cpu, **asked))
            return mask

        return create_block_mask

    torch.compile = functools.wraps(compile_)(compiled)


def _write(mask, mask_mod, make):
    """Write the blocks that `make` finds with `mask_mod` on the CPU into `mask`."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes
    from virtual_gpu_own_time import following_ns, now
    from virtual_gpu_values import compute, written

    began = now()
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = compute("create_block_mask", lambda: make(_on_cpu(mask_mod)))
            results = () if found is None else zip(mask.as_tuple(), found.as_tuple(), strict=True)
            for to, known in results:
                if isinstance(to, torch.Tensor):
                    written(to, known)
    except _UnknownError:
        pass
    following_ns.value += now() - began  # on a GPU no program spends this


def _on_cpu(value):
    """A mask's function, or what it closes over, with tensors of the host in place of those of the device."""
    import torch
    from virtual_gpu_held import is_held, is_plain, values_of

    if isinstance(value, torch.Tensor):
        if not value.is_cuda:
            return value
        if not is_plain(value) or not is_held(value):
            raise _UnknownError
        return values_of(value).clone()
    if type(value) in (tuple, list):
        return type(value)(map(_on_cpu, value))
    if not isinstance(value, types.FunctionType) or not value.__closure__:
        return value
    cells = tuple(types.CellType(_on_cpu(cell.cell_contents)) for cell in value.__closure__)
    copied = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
    copied.__kwdefaults__ = value.__kwdefaults__
    return copied
