"""Kernels that Python launches by Triton, as operators: each touches every one of its tensors once. One that
it reads and writes counts once, too.

A simulation calls the operators in place of a launch, and on the virtual GPU a launch happens within one
(virtual_gpu/startup/virtual_gpu_triton.py).
"""

import torch

from harness.kernels.operators import declare

_LIBRARY = torch.library.Library("harness", "FRAGMENT")
for _name in ("triton_kernel", "unknown_triton_kernel"):
    _LIBRARY.define(f"{_name}(Tensor[] touched, str name) -> ()")
    _LIBRARY.impl(_name, lambda touched, name: None, "CompositeExplicitAutograd")

# Of Liger and of torch.compile, whose kernels wait for memory. What others compute (products among them)
# nobody has looked at: the second operator is not declared.
declare("harness::triton_kernel", nothing="Python makes what it writes into")
