"""Liger's fused linear cross-entropy on shape-only tensors, along the branches that it takes on CUDA."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

MODULE = "liger_kernel.ops.fused_linear_cross_entropy"
ASKING = ("_can_use_mm_out", "fused_linear_cross_entropy_forward")
"""Its functions that ask what device a tensor is on. Older Ligers lack the first, and ask nothing."""


def liger_patches(capability: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """The targets and replacements: Liger's own code with "cuda" read as the meta device.

    A tensor's device cannot be made to lie. On any other than CUDA this code adds up the head's gradient
    through a copy of it in fp32, for every chunk of tokens. `capability` is (9, 0) for 9.0.
    """
    module = import_module(MODULE)
    names = {**vars(module), "_capability": lambda *_: capability}
    asking = [name for name in ASKING if hasattr(module, name)]
    for name in asking:
        function = getattr(module, name)
        source = inspect.getsource(function)
        source = source.replace('.device.type == "cuda"', '.device.type == "meta"')
        source = source.replace('.device.type != "cuda"', '.device.type != "meta"')
        source = source.replace("torch.cuda.get_device_capability(", "_capability(")
        above = "\n" * (function.__code__.co_firstlineno - 1)  # stacks name the lines of the file
        exec(compile(above + source, inspect.getfile(function), "exec"), names)
    for name in asking:
        yield f"{MODULE}.{name}", names[name]
