"""How long one operator takes on a device: describes its kernel as harness/kernel_time asks for it."""

from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from harness.hardware import Hardware
from harness.kernel_time import ALIGNED_BYTES, KernelKind, attention, memory, product, unaligned_product
from harness.kernels.collectives import BF16_TO_FP32
from harness.kernels.operators import operator_name
from harness.kernels.walks import walk_of
from harness.observe import Convolution
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
    "copy_in",
    "cast_in",
]
"""The classes of kernels under which reports show where the time goes."""


class OperatorTime(NamedTuple):
    """How long the kernels of one call of an operator take, and what they are."""

    seconds: float
    kind: KernelKind
    """Decides how uncertain `seconds` is: estimates of one kind err alike."""
    kernel_class: KernelClass
    computes: bool
    """Whether the multiprocessors limit it, and not memory."""
    at_limit: bool = False
    """Whether it is as slow as on a device at its power limit (harness/kernel_time/power.py)."""
    timed_as: str = "elementwise"
    """What harness/kernel_time calls a kernel that moves bytes: its class, or how it walks through them."""
    elements: int = 0
    """Of lists of tensors: how many elements one list has."""


_OPERATORS: dict[KernelClass, str] = {
    "norm": "native_layer_norm native_group_norm _fused_rms_norm native_batch_norm cudnn_batch_norm",
    "softmax": "_softmax _safe_softmax",
    "cross_entropy": "_log_softmax nll_loss_forward nll_loss_backward",
    "embedding": "embedding embedding_dense_backward index_select",
    "reduction": "sum mean amax _foreach_norm linalg_vector_norm",
    "copy": "_to_copy copy_ clone cat",
    "copy_in": "chunk_cat chunk_cat_mixed_dtype",
    "optimizer": "_fused_adamw_ _fused_adam_ _fused_sgd_",
}
_CLASSES: dict[str, KernelClass] = {
    name: kind for kind, names in _OPERATORS.items() for name in names.split()
}
"""The class by the operator's name, without namespace and `_backward`. For bitsandbytes and lists of tensors
see `class_of`."""
FLEX_RATES: dict[Literal["forward", "backward"], float] = {"forward": 0.90, "backward": 0.85}
"""What flex attention reaches of FlashAttention 2's speed, as its authors say of an A100
(pytorch.org/blog/flexattention)."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NAMES |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), "fp8")


def class_of(name: str) -> KernelClass:
    """The class of an operator without FLOPs by its schema's name: "aten::native_layer_norm_backward"."""
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
    func: Any,
    args: Any,
    kwargs: dict[str, Any],
    out: Any,
    hardware: Hardware,
    flops: int,
    moved: int,
    before: int,
) -> OperatorTime:
    """The time of one call with result `out` that does `flops` and moves `moved` bytes, `before` of them by a
    kernel that has ended when the FLOPs begin. Raises InputError for a dtype that the device does not compute
    in."""
    name = operator_name(func)
    if is_convolution(name):
        return _convolution(Convolution.of(name, args, out), hardware, moved)
    if not flops:
        kernel = class_of(name)
        if kernel == "copy_in":
            kernel = _copy_in(args[0][0].dtype, kwargs["out"].dtype)
        timed_as = walk_of(func, args, out) or kernel
        elements = sum(map(Tensor.numel, args[0])) if timed_as == "foreach" else 0
        seconds = memory(hardware, timed_as, moved, elements=elements) if moved else 0.0
        return OperatorTime(seconds, "memory", kernel, False, timed_as=timed_as, elements=elements)
    factor = next(iter(_factors(name, args)), None)
    dtype = "fp16" if factor is None else dtype_of_products(factor.dtype, hardware)
    rest = moved - before
    memory_s = memory(hardware, "elementwise", rest)
    kind: Literal["attention", "product"] = "attention" if "attention" in name else "product"
    if kind == "attention":
        seconds = _attention_s(func, args, kwargs, hardware, dtype, flops, rest)
    else:
        seconds = _product_s(name, args, hardware, dtype, flops)
        of_matrices = name.partition("::")[2] in ("mm", "addmm", "bmm", "baddbmm")
        if of_matrices and not all(map(_has_aligned_rows, (*_factors(name, args)[:2], out))):
            seconds = max(seconds, unaligned_product(hardware, flops))
    computes = seconds > memory_s
    seconds = max(seconds, rest / hardware.memory_bandwidth)
    if before:
        seconds += memory(hardware, "dequantize", before)
    # attention's estimates stay: on an H100 it took longer at the boost clock than its fit says
    at_limit = computes and kind == "product" and dtype in ("bf16", "fp16")
    return OperatorTime(seconds, kind, kind, computes, at_limit)


def is_convolution(name: str) -> bool:
    """Whether `name` ("aten::mm") is aten::convolution or its backward."""
    return name.startswith("aten::convolution")


def _convolution(call: Convolution, hardware: Hardware, moved: int) -> OperatorTime:
    """The time of cuDNN's products. Its kernels for tensor cores want channels last: where neither side lies
    so, it transposes what it reads and what it has made. How a result lies on CUDA, meta does not say."""
    if call.is_depthwise:
        return OperatorTime(memory(hardware, "elementwise", moved), "memory", "elementwise", False)
    dtype = dtype_of_products(call.weight.dtype, hardware, of_convolutions=True)
    seconds = sum(product(hardware, dtype, *each) for each in call.products())
    sides = call.smaller, call.larger
    if dtype != "fp32" and not any(map(_has_channels_last, sides)):
        seconds += memory(hardware, "copy", sum(2 * side.nbytes for side in sides) * len(call.makes))
    computes = seconds > moved / hardware.memory_bandwidth
    seconds = max(seconds, moved / hardware.memory_bandwidth)
    return OperatorTime(seconds, "product", "product", computes, computes and dtype in ("bf16", "fp16"))


def _has_channels_last(tensor: Tensor) -> bool:
    """Whether the channels of a position lie side by side, as those of one position, or one channel, do."""
    return tensor.shape[1] == 1 or prod(tensor.shape[2:]) == 1 or tensor.stride(1) == 1


def dtype_of_products(dtype: torch.dtype, hardware: Hardware, of_convolutions: bool = False) -> str:
    """The name of `dtype` as units that multiply have it: "tf32" for fp32 where this program allows it.
    PyTorch allows it for convolutions if nothing else is said. One without a rate in the table, as int8,
    counts as fp16, which every device computes in."""
    name = _NAMES.get(dtype, "fp16")
    backends: Any = torch.backends
    backend = backends.cudnn.conv if of_convolutions else backends.cuda.matmul
    allowed = name == "fp32" and backend.fp32_precision == "tf32" and hardware.supports("tf32")
    return "tf32" if allowed else name


def _copy_in(before: torch.dtype, after: torch.dtype) -> KernelClass:
    """FSDP2's gradients into one tensor: which kernel does it (kernels/collectives.py, copy_in)."""
    if before == after:
        return "copy_in"
    return "cast_in" if (before, after) == BF16_TO_FP32 else "elementwise"


def _factors(name: str, args: Any) -> list[Tensor]:
    """The tensor arguments, without the one that a product is added to, whose dtype may be wider."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return tensors[1:] if name.partition("::")[2] in ("addmm", "addmm_", "baddbmm") else tensors


def _has_aligned_rows(matrix: Any) -> bool:
    """Whether a factor or a result of 16-bit numbers has rows that all begin on 16 bytes, as the kernels of
    tensor cores read them best. A vocabulary of 50,257 does not."""
    if not isinstance(matrix, Tensor) or matrix.dim() < 2 or matrix.element_size() != 2:
        return True
    apart = max(matrix.stride()[-2:]) * matrix.element_size()
    return apart % ALIGNED_BYTES == 0 or min(matrix.shape[-2:]) == 1


def _product_s(name: str, args: Any, hardware: Hardware, dtype: str, flops: int) -> float:
    """Seconds by the factors' shapes; an operator of several products counts as one of as many FLOPs."""
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
    """Seconds by the shapes of query and key: batch x heads x length x size, or flash-attn's own order."""
    name = operator_name(func)
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    direction: Literal["forward", "backward"] = "backward" if name.endswith("backward") else "forward"
    query, key = given["query"], given["key"]
    # flash-attn's own operators: batch x length x heads x size, or rows x heads x size
    of_package = name.startswith("harness::flash")
    if of_package:
        heads, head_dim = query.shape[-2], query.shape[-1]
        sequences, length = (query.shape[0], query.shape[1]) if query.dim() == 4 else (1, query.shape[0])
        keys = key.shape[-3]
    else:
        sequences, heads, length, head_dim = query.shape
        keys = key.shape[-2]
    batch: float = sequences
    if "flash" in name or "flex" in name:
        # version 4 is taken to reach the rates of version 3: no times of it are fitted here
        kernel = "flash3" if of_package and given["version"] != 2 else "flash2"
    else:
        kernel = "cudnn" if "cudnn" in name else "efficient"
    causal = bool(given.get("is_causal", given.get("causal", "flex" in name)))
    seen = given.get("seen", keys)
    if seen != keys:  # what a window, or documents end to end, leave out is not computed
        batch, length, keys = batch * length / seen, seen, seen
    arguments = (hardware, kernel, direction, batch, heads, length, keys, head_dim)
    seconds = attention(*arguments, causal=causal, dtype=dtype, bytes_moved=moved)  # type: ignore[arg-type]
    return seconds / FLEX_RATES[direction] if "flex" in name else seconds
