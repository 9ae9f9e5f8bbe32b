"""The rules by which a shape-only run behaves as it would on CUDA: one for each difference.

`cuda_behaviour()` makes Python code take the branches, and choose the kernels, that it would with a GPU. Some
rules have files of their own: simulate/cuda/autocast.py, kernels/attention_choice.py (which kernel),
simulate/cuda/attention_call.py, simulate/cuda/flash_attn_package.py, simulate/cuda/libraries.py
(transformers, Liger, Triton, bitsandbytes), and kernels/operators.py (what one operator does).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import handle_torch_function
from torch.utils._device import _device_constructors

from harness.formula import Ruled
from harness.hardware import Hardware
from harness.kernels import CUDNN_DEPRIORITIZED, AttentionCall, Gpu, chosen_backend, operator_of
from harness.recipe import Recipe
from harness.simulate.cuda.attention_call import attention_on_meta
from harness.simulate.cuda.autocast import cuda_autocast_on_meta
from harness.simulate.cuda.flash_attn_package import flash_replacements
from harness.simulate.cuda.flex_attention import flex_replacements
from harness.simulate.cuda.known_values import remember, with_numbers, with_values
from harness.simulate.cuda.libraries import library_replacements
from harness.simulate.cuda.shape_cache import Call, ShapeCache
from harness.system import Replacement, all_replaced, nothing

aten = torch.ops.aten


class CudaRules:
    """The rules for one recipe on one GPU."""

    def __init__(
        self,
        recipe: Recipe,
        hardware: Hardware,
        empty_cache: Callable[[], None] = lambda: None,
        ruled: dict[int, Ruled] | None = None,
    ) -> None:
        self.recipe, self.hardware = recipe, hardware
        self.empty_cache = empty_cache
        """torch.cuda.empty_cache of the simulated device."""
        self.synchronize: Callable[[], None] = nothing
        """torch.cuda.synchronize of the simulated device."""
        self.ruled = {} if ruled is None else ruled
        """Where code that makes a tensor by a rule says so: see SimulatedMemory."""
        self.attention_kernels: set[str] = set()
        """The attention kernels that were chosen, by name."""
        self._shapes = ShapeCache()
        self._results: dict[int, Callable[[Any, Any, Any], Any] | None] = {}
        """By id of an operator, what makes its results instead of its shape function; None for most.
        Operators live as long as torch, and hashing one is slow."""
        self.gpu = Gpu.of(hardware, torch.__version__)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call]:
        """Run an operator on shape-only tensors. Returns its result, and the Call, which is the same each
        time the operator is called on such shapes."""
        if self.recipe.images or self.recipe.by_peft:
            return with_values(func, args, kwargs, self._run)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Call]:
        """`run` without the values of integers (known_values.py)."""
        try:
            result = self._results[id(func)]
        except KeyError:
            result = self._results[id(func)] = operator_of(func).result
        if result is not None and (out := result(func, args, kwargs)) is not NotImplemented:
            return out, Call()
        return self._shapes.run(func, args, kwargs)


def _attention(rules: CudaRules) -> Callable[..., Tensor]:
    """The function F.scaled_dot_product_attention with CUDA's choice of kernel."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if torch._C._is_torch_function_mode_enabled():  # autocast casts the arguments first
            return handle_torch_function(scaled_dot_product_attention, given[:3], *given)
        call = AttentionCall(
            query=query.shape,
            key=key.shape,
            value=value.shape,
            dtype=query.dtype,
            mask=None if attn_mask is None else attn_mask.shape,
            dropout_p=dropout_p,
            is_causal=is_causal,
            enable_gqa=enable_gqa,
            requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in given[:3]),
            mask_requires_grad=attn_mask is not None and attn_mask.requires_grad,
            capability=rules.gpu.capability,
            torch=rules.gpu.torch,
        )
        backend = chosen_backend(call, cudnn_deprioritized=os.environ.get(CUDNN_DEPRIORITIZED) == "1")
        rules.attention_kernels.add(backend)
        return attention_on_meta(*given, backend)

    return scaled_dot_product_attention


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear, which adds the bias in place where the product has none of its own. Not so for subclasses of
    tensors, which all tensors are to PyTorch in a dispatch mode.

    ATen/native/Linear.cpp: the inputs of more than two dimensions that are not contiguous.
    """
    if bias is None or input.dim() < 3 or input.is_contiguous() or type(bias) not in (Tensor, Parameter):
        return _plain_linear(input, weight, bias)
    if torch._C._is_torch_function_mode_enabled():  # autocast casts the arguments first
        return handle_torch_function(_linear, (input, weight), input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


_plain_linear = functional.linear
_linear.__name__ = "linear"  # as autocast knows it


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """F.one_hot, which on a device writes ones into zeros, and on meta compares.

    ATen/native/Onehot.cpp.
    """
    if num_classes < 1 or not tensor.is_meta:
        return _plain_one_hot(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=tensor.dtype, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


_plain_one_hot = functional.one_hot


def _fused_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """F.dropout as on CUDA, where one kernel does it and keeps a mask of one byte per element.

    ATen/native/Dropout.cpp, is_fused_kernel_acceptable: CUDA input, 0 < p < 1.
    """
    if not training or p == 0 or inplace:
        return torch.dropout_(input, p, training) if inplace else torch.dropout(input, p, training)
    return torch.native_dropout(input, p, True)[0]


def _softmax(plain: Callable[..., Tensor], fused: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """F.softmax or F.log_softmax, which on CUDA take fp16 to fp32 in one kernel, without an fp32 input.

    ATen/native/SoftMax.cpp, softmax: CUDA input, Half, dtype Float.
    """

    def softmax(input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        if torch.is_autocast_enabled("meta") and dtype is None:
            dtype = torch.float32
        if input.is_meta and dim is not None and input.dtype == torch.float16 and dtype == torch.float32:
            return fused(input, dim, True)
        return plain(input, dim, _stacklevel, dtype)

    return softmax


@contextmanager
def cuda_behaviour(rules: CudaRules) -> Iterator[None]:
    """Inside, code that asks about the meta device gets the answers that a CUDA device would give."""
    # torch remembers its constructors when they are first asked for: let it be torch's own, not replacements
    _device_constructors()
    with (
        cuda_autocast_on_meta(),
        _fused_on_meta(),
        all_replaced(_replacements(rules)),
        masks_select_all() if rules.recipe.by_trl else nullcontext(),
    ):
        yield


def masks_select_all() -> AbstractContextManager[Any]:
    """Inside, a mask of shape-only tensors selects every element. TRL selects the tokens that have a label:
    with synthetic pairs that is all but the first token of a row, which TRL has left out before."""
    from torch.fx.experimental import _config

    return _config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]


@contextmanager
def _fused_on_meta() -> Iterator[None]:
    """Inside, F.rms_norm of shape-only tensors is one operator with a derivative of its own, as on devices
    that have a kernel for it (native/layer_norm.cpp, rms_norm_symint)."""
    registered: Any = torch.library.Library("aten", "IMPL").m
    # Library.impl refuses: shapes could come from what rms_norm is made of
    registered.impl("_fused_rms_norm", "Meta", _shapes_of_rms_norm, False)
    try:
        yield
    finally:
        registered.reset()


def _shapes_of_rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """The output and the reciprocal root mean squares (cuda/layer_norm_kernel.cu, _fused_rms_norm_cuda)."""
    rows = input.shape[: input.dim() - len(normalized_shape)]
    one_each = (*rows, *[1] * len(normalized_shape))
    out = torch.empty_like(input, memory_format=torch.contiguous_format)
    return out, input.new_empty(one_each, dtype=torch.float32)


def _replacements(rules: CudaRules) -> Iterator[Replacement]:
    """The functions of torch and the libraries that ask about the device, with answers of a CUDA device."""
    yield Replacement("torch.tensor", seen_tensor, "makes a tensor without an operator")
    yield Replacement("torch.Tensor.__setitem__", _set_item_from_host, "makes a tensor of a number")
    # functions and not a TorchFunctionMode: none is active where a checkpointed block runs again
    functions = {
        "dropout": _fused_dropout,
        "linear": _linear,
        "one_hot": _one_hot,
        "softmax": _softmax(functional.softmax, torch._softmax),
        "log_softmax": _softmax(functional.log_softmax, torch._log_softmax),
        "scaled_dot_product_attention": _attention(rules),
    }
    for name, function in functions.items():
        yield Replacement(f"torch.nn.functional.{name}", function, "runs another kernel on CUDA")
    name = "torch.utils._foreach_utils._get_foreach_kernels_supported_devices"
    yield Replacement(name, lambda: ["meta", "cuda"], "clips gradients one by one")
    name = "torch.optim.optimizer._get_fused_kernels_supported_devices"
    yield Replacement(name, lambda: ["meta", "cuda", "cpu"], "refuses fused optimizers")
    yield Replacement("torch.cuda.synchronize", rules.synchronize, "raises, and libraries call it")
    yield Replacement("torch.cuda.empty_cache", rules.empty_cache, "does nothing")
    if rules.recipe.flash_package:
        rules.attention_kernels.add(rules.recipe.attention)
        yield from flash_replacements(int(rules.recipe.attention[-1]), rules.recipe.document_tokens)
    if rules.recipe.flex:
        rules.attention_kernels.add(rules.recipe.attention)
        yield from flex_replacements(
            rules.recipe.packs_by_positions, rules.recipe.document_tokens, rules.gpu.l2_bytes
        )
    yield from library_replacements(rules.recipe, rules.gpu, rules.ruled, rules.synchronize)
    if find_spec("bitsandbytes") is not None:
        yield Replacement("bitsandbytes.functional.name2qmap", {}, "makes code tables once a process")


_tensor = torch.tensor
_set_item = Tensor.__setitem__


def seen_tensor(data: Any, **options: Any) -> Tensor:
    """torch.tensor, but with an operator that makes a shape-only result.

    torch makes one without an operator, so that no dispatch mode would see it, although it takes a block of
    memory on CUDA (a masked-out score, in transformers before 5.23).
    """
    made = _tensor(data, **options)
    if not made.is_meta:
        return made
    seen = torch.empty_like(made).requires_grad_(made.requires_grad)
    host = with_numbers(data)
    return (
        seen if host is None or made.is_floating_point() else remember(seen, _tensor(host, dtype=made.dtype))
    )


def _set_item_from_host(tensor: Tensor, index: Any, value: Any) -> None:
    """Tensor.__setitem__, as in tensor[index] = 0, with the number on the host.

    It stays there where the tensor is on a GPU, and would become a tensor on the device of any other tensor
    (csrc/autograd/python_variable_indexing.cpp, THPVariable_setitem).
    """
    if tensor.is_meta and isinstance(value, bool | int | float):
        value = _tensor(value, dtype=tensor.dtype)
    _set_item(tensor, index, value)
