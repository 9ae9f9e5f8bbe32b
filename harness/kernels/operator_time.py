"""What one operator takes of a device's time: which kernel it is, described as harness/kernel_time wants
it."""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.hardware import Hardware
from harness.kernel_time import KernelKind, attention, memory, product
from harness.kernels.operators import operator_name
from harness.training import DTYPES

KernelClass = Literal[
    "product",
    "attention",
    "norm",
    "softmax",
    "cross_entropy",
    "embedding",
    "reduction",
    "elementwise",
    "optimizer",
    "dequantize",
    "copy",
]
"""What a reader asks about: where the time goes."""


class OperatorTime(NamedTuple):
    """Of the kernels of one call of an operator."""

    seconds: float
    kind: KernelKind
    """What the estimate errs alike in."""
    kernel_class: KernelClass
    computes: bool
    """Whether it waits for the multiprocessors rather than for memory."""


_OPERATORS: dict[KernelClass, str] = {
    "norm": "native_layer_norm native_group_norm _fused_rms_norm",
    "softmax": "_softmax _safe_softmax",
    "cross_entropy": "_log_softmax nll_loss_forward nll_loss_backward",
    "embedding": "embedding embedding_dense_backward index_select",
    "reduction": "sum mean amax _foreach_norm linalg_vector_norm",
    "copy": "_to_copy copy_ clone cat",
    "optimizer": "_fused_adamw_ _fused_adam_ _fused_sgd_",
}
_CLASSES: dict[str, KernelClass] = {
    name: kind for kind, names in _OPERATORS.items() for name in names.split()
}
"""By the operator's name without its namespace and `_backward`; of bitsandbytes and lists below."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMES |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8")


def class_of(name: str) -> KernelClass:
    """Of an operator, by the name in its schema: "aten::native_layer_norm_backward"."""
    space, _, short = name.partition("::")
    short = short.removesuffix("_data") if short.endswith("_backward_data") else short
    found = _CLASSES.get(short) or _CLASSES.get(short.removesuffix("_backward"))
    if found is not None:
        return found
    if short.startswith("_foreach"):
        return "optimizer"
    if space == "bitsandbytes":
        return "dequantize" if "quantize" in short else "optimizer"
    return "elementwise"


def operator_time(
    func: Any, args: Any, kwargs: dict[str, Any], hardware: Hardware, flops: int, moved: int, before: int
) -> OperatorTime:
    """Of one call that does `flops` and moves `moved` bytes, of which `before` by a kernel that is over
    before
    the FLOPs begin. Raises InputError for a dtype that the device does not compute in."""
    name = operator_name(func)
    if not flops:
        kernel = class_of(name)
        seconds = memory(hardware, kernel, moved) if moved else 0.0
        return OperatorTime(seconds, "memory", kernel, computes=False)
    dtype = _dtype(name, args)
    beside = moved - before
    memory_s = memory(hardware, "elementwise", beside)
    kind: Literal["attention", "product"] = "attention" if "attention" in name else "product"
    if kind == "attention":
        seconds = _attention_s(func, args, kwargs, hardware, dtype, flops, beside)
    else:
        seconds = _product_s(name, args, hardware, dtype, flops)
    computes = seconds > memory_s
    seconds = max(seconds, beside / hardware.memory_bandwidth)
    if before:
        seconds += memory(hardware, "dequantize", before)
    return OperatorTime(seconds, kind, kind, computes)


def _factors(name: str, args: Any) -> list[Tensor]:
    """The tensors that are given, without what a product is added to: it may be wider."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return tensors[1:] if name.partition("::")[2] in ("addmm", "addmm_", "baddbmm") else tensors


def _dtype(name: str, args: Any) -> str:
    """Of the first factor; of other dtypes (int8) the table has no rate: that of 16 bit, and fp16 is what
    every device has."""
    tensor = next(iter(_factors(name, args)), None)
    return "fp16" if tensor is None else _NAMES.get(tensor.dtype, "fp16")


def _product_s(name: str, args: Any, hardware: Hardware, dtype: str, flops: int) -> float:
    """From the factors' shapes; what multiplies in another way, as one product of as many FLOPs."""
    short = name.partition("::")[2]
    left = _factors(name, args)[0]
    k = left.shape[-1]
    batched = short in ("bmm", "baddbmm")
    batch, m = (left.shape[0], left.shape[1]) if batched else (1, left.numel() // max(1, k))
    n = flops // max(1, 2 * batch * m * k)
    if n * 2 * batch * m * k != flops or not n:  # several products at once: of experts, of a list
        return product(hardware, dtype, max(1, m), max(1, n), max(1, k), batch)
    return product(hardware, dtype, m, n, k, batch)


def _attention_s(
    func: Any, args: Any, kwargs: dict[str, Any], hardware: Hardware, dtype: str, flops: int, moved: int
) -> float:
    """From the shapes of query and key, batch x heads x length x size, or flash-attn's own order."""
    name = operator_name(func)
    given = _by_name(func, args, kwargs)
    direction = "backward" if name.endswith("backward") else "forward"
    query, key = given["query"], given["key"]
    own = name.startswith("harness::")  # flash-attn's: batch x length x heads x size, or rows x heads x size
    if own:
        heads, head_dim = query.shape[-2], query.shape[-1]
        batch, length = (query.shape[0], query.shape[1]) if query.dim() == 4 else (1, query.shape[0])
        keys = key.shape[-3]
    else:
        batch, heads, length, head_dim = query.shape
        keys = key.shape[-2]
    if "flash" in name:
        kernel = "flash3" if own and given.get("version") == 3 else "flash2"
    else:
        kernel = "cudnn" if "cudnn" in name else "efficient"
    causal = bool(given.get("is_causal", given.get("causal", False)))
    if own and query.dim() == 3:  # documents end to end: as long as the FLOPs say
        factor = 4 if direction == "forward" else 10
        length = keys = max(1, flops // max(1, factor * heads * head_dim * query.shape[0]))
        batch = max(1, query.shape[0] // length)
    asked = (hardware, kernel, direction, batch, heads, length, keys, head_dim)
    return attention(*asked, causal=causal, dtype=dtype, bytes_moved=moved)  # type: ignore[arg-type]


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}
