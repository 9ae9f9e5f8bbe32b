"""Adjusts a device's estimates to a trace of torch.profiler: the operators in it whose time can be estimated,
and by how much their measured times differ.

The trace is the one of `export_chrome_trace`, recorded with `record_shapes=True`: a kernel names, by its
`External id`, the operator of PyTorch that launched it, which has the shapes and dtypes of its arguments.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal
from zlib import MAX_WBITS, decompressobj
from zlib import error as zlib_error

from harness.errors import InputError
from harness.hardware import Hardware
from harness.kernel_time.estimates import attention, memory, product
from harness.kernel_time.power import PowerLimit
from harness.system import is_array, is_object, parse_json, read_whole

MAX_TRACE_BYTES, MAX_TRACE_VALUES = 2**31, 2**28
FEWEST = 5
"""How many operators of a kind a trace must have for a scale of that kind."""
SHORTEST_S = 10e-6
"""Operators that take fewer seconds are left out: a kernel's launch is most of their time."""

Kind = Literal["product", "attention", "memory"]

PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that multiply, and the position of the first factor among their arguments."""
ATTENTION: dict[str, tuple[str, Literal["forward", "backward"], int]] = {
    "aten::_scaled_dot_product_flash_attention": ("flash2", "forward", 0),
    "aten::_scaled_dot_product_efficient_attention": ("efficient", "forward", 0),
    "aten::_scaled_dot_product_cudnn_attention": ("cudnn", "forward", 0),
    "aten::_scaled_dot_product_flash_attention_backward": ("flash2", "backward", 1),
    "aten::_scaled_dot_product_efficient_attention_backward": ("efficient", "backward", 1),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("cudnn", "backward", 1),
}
"""Operators of fused attention: the kernel, the direction, and the position of the query."""
ELEMENTWISE: dict[str, int] = {
    "aten::add": 3,
    "aten::mul": 3,
    "aten::add_": 3,
    "aten::mul_": 2,
    "aten::silu": 2,
    "aten::gelu": 2,
    "aten::copy_": 2,
}
"""Operators that wait for memory, and how many tensors of the largest argument's size they move."""
BYTES = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "double": 8, "long int": 8, "int": 4}
NAMES = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16"}
"""BYTES and names of the dtypes, by what the profiler calls them."""


@dataclass(frozen=True)
class Seen:
    """An operator of the trace: the seconds of all its kernels together, and what decides them."""

    kind: Kind
    seconds: float
    name: str
    dtype: str
    shape: tuple[int, ...]
    """m, n, k and batch of a product; batch, heads, lengths of query and keys and head size of attention; the
    bytes that any other operator moves."""
    causal: bool = True

    @property
    def at_limit(self) -> bool:
        """Whether the power limit may slow it down."""
        return self.kind == "product" and self.dtype != "fp32"

    def estimate(self, hardware: Hardware, eased: float = 1.0) -> float:
        """Seconds on `hardware`; `eased`: the factor of PowerLimit for the step that the trace is of."""
        if self.kind == "product":
            m, n, k, batch = self.shape
            return product(hardware, self.dtype, m, n, k, batch) * (eased if self.at_limit else 1.0)
        if self.kind == "attention":
            kernel, direction, _ = ATTENTION[self.name]
            batch, heads, query, keys, head_dim = self.shape
            arguments = (hardware, kernel, direction, batch, heads, query, keys, head_dim)
            return attention(*arguments, causal=self.causal, dtype=self.dtype)
        return memory(hardware, "elementwise", self.shape[0])


@dataclass(frozen=True)
class Trace:
    """The operators of a trace whose time can be estimated."""

    device: str | None
    """The device's name, as the driver has it; None where the trace has none."""
    seen: tuple[Seen, ...]
    span_s: float = 0.0
    """From the beginning of the first kernel to the end of the last one."""

    def eased(self, hardware: Hardware) -> float:
        """The factor of PowerLimit for a device that worked as in this trace."""
        power = PowerLimit(hardware)
        power.after_step(sum(seen.seconds for seen in self.seen if seen.at_limit), self.span_s)
        return power.factor


@dataclass(frozen=True)
class Adjusted:
    """The new scale of one kind of kernel, and how far off the estimates are without and with it."""

    kind: Kind
    count: int
    """How many operators of the trace it follows from."""
    scale: float
    """The median of measured over estimated seconds."""
    before: float
    """The median of the relative errors, a fraction, before the adjustment."""
    after: float
    """The same with the new scale."""


def read_trace(path: Path) -> Trace:
    """The trace in a file that torch.profiler's `export_chrome_trace` wrote. Raises InputError for others."""
    try:
        content = read_whole(path, MAX_TRACE_BYTES)
        if content.startswith(b"\x1f\x8b"):  # export_chrome_trace compresses for a name that ends in .gz
            content = decompressobj(MAX_WBITS | 16).decompress(content, MAX_TRACE_BYTES)
        document = parse_json(content, MAX_TRACE_VALUES)
    except OSError as error:
        raise InputError(f"--trace {path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError, zlib_error) as error:
        raise InputError(f"{path} is no trace: {error}. Name a file of export_chrome_trace.") from None
    events = document.get("traceEvents") if is_object(document) else None
    if not is_array(events):
        raise InputError(f"{path} has no traceEvents. Name a file of torch.profiler's export_chrome_trace.")
    named = document.get("deviceProperties")
    first: object = named[0] if is_array(named) and named else None
    name = first.get("name") if is_object(first) else None
    took, operators = _by_id(event for event in events if is_object(event))
    if not took:
        raise InputError(
            f"{path} has no kernels of a GPU. Record with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA]."
        )
    seen = [s for key, seconds in took.items() for s in _seen(operators.get(key), seconds)]
    if not seen:
        raise InputError(f"{path}: no operator has shapes. Record with record_shapes=True.")
    times = [(e["ts"], e["ts"] + e["dur"]) for e in events if is_object(e) and _is_timed_kernel(e)]
    span_us = max(end for _, end in times) - min(begin for begin, _ in times) if times else 0.0
    return Trace(name if isinstance(name, str) else None, tuple(seen), span_us * 1e-6)


def _is_timed_kernel(event: Mapping[str, Any]) -> bool:
    numbers = (event.get("ts"), event.get("dur"))
    return event.get("cat") == "kernel" and all(isinstance(number, int | float) for number in numbers)


def _by_id(events: Iterable[Mapping[str, Any]]) -> tuple[dict[Any, float], dict[Any, Mapping[str, Any]]]:
    """The seconds of each operator's kernels, and the operators, both by their `External id`."""
    took: dict[Any, float] = defaultdict(float)
    operators: dict[Any, Mapping[str, Any]] = {}
    for event in events:
        given = event.get("args")
        if not is_object(given) or "External id" not in given:
            continue
        key, duration = given["External id"], event.get("dur", 0)
        if event.get("cat") == "kernel" and isinstance(duration, int | float):
            took[key] += float(duration) * 1e-6
        elif event.get("cat") == "cpu_op":
            operators[key] = event
    return took, operators


def _seen(operator: Mapping[str, Any] | None, seconds: float) -> Iterable[Seen]:
    """The operator of a trace's event, or nothing where it is too short or cannot be estimated."""
    if operator is None or seconds < SHORTEST_S:
        return
    name, given = str(operator.get("name")), operator["args"]
    shapes, types = given.get("Input Dims"), given.get("Input type")
    if not is_array(shapes) or not is_array(types):
        return
    shape = _shape(name, shapes, types)
    if shape is None or (name in ELEMENTWISE and not _alike(given)):
        return
    position = PRODUCTS.get(name, ATTENTION[name][2] if name in ATTENTION else 0)
    dtype = NAMES.get(str(types[position]), "")
    if name in ELEMENTWISE:
        yield Seen("memory", seconds, name, dtype, shape)
    elif dtype:
        kind: Kind = "product" if name in PRODUCTS else "attention"
        yield Seen(kind, seconds, name, dtype, shape, _causal(name, given))


def _alike(given: Mapping[str, Any]) -> bool:
    """Whether all tensors of an elementwise operator have one layout and dtype: of others the memory is not
    what they wait for (harness/kernels/walks.py)."""
    columns = (given.get(name) or () for name in ("Input Dims", "Input type", "Input Strides"))
    return len({str(each) for each in zip(*columns, strict=False) if each[0]}) <= 1


def _shape(name: str, shapes: Sequence[Any], types: Sequence[Any]) -> tuple[int, ...] | None:
    """See `Seen.shape`; None for an operator that cannot be estimated or whose shapes are missing."""
    try:
        if name in PRODUCTS:
            left, right = shapes[PRODUCTS[name]], shapes[PRODUCTS[name] + 1]
            batch = int(left[0]) if len(left) == 3 else 1
            return int(left[-2]), int(right[-1]), int(left[-1]), batch
        if name in ATTENTION:
            query, key = shapes[ATTENTION[name][2]], shapes[ATTENTION[name][2] + 1]
            batch, heads, length, size = map(int, query)
            return batch, heads, length, int(key[-2]), size
        if name in ELEMENTWISE:
            sizes = [prod(s) * BYTES.get(str(t), 0) for s, t in zip(shapes, types, strict=False) if s]
            return (ELEMENTWISE[name] * max(sizes),)
    except (IndexError, TypeError, ValueError):
        return None
    return None


def _causal(name: str, given: Mapping[str, Any]) -> bool:
    """The operator's `is_causal` where the profiler wrote its inputs; else true, as in language models."""
    inputs = given.get("Concrete Inputs")
    if name in ATTENTION and is_array(inputs):
        flags = [text for text in inputs if text in ("True", "False")]
        return flags[0] == "True" if flags else True
    return True


def adjust(trace: Trace, hardware: Hardware) -> tuple[Hardware, list[Adjusted]]:
    """`hardware` with the scales of its calibration set to what the trace shows, and what changed. A kind of
    which the trace has few operators keeps its scale. Raises InputError where nothing can be adjusted."""
    from statistics import median  # not at the top: it takes as long as all of this package

    calibration, found = hardware.calibration, list[Adjusted]()
    scales = {"product_scale": 1.0, "attention_scale": 1.0, "memory_scale": 1.0}
    plain = {"matmul_fraction": None, "attention_fraction": None, "memory_fraction": None}
    bare = replace(hardware, calibration=calibration.model_copy(update={**scales, **plain}))
    eased = trace.eased(bare)
    for kind in ("product", "attention", "memory"):
        seen = [s for s in trace.seen if s.kind == kind and (not s.dtype or bare.supports(s.dtype))]
        if len(seen) < FEWEST:
            scales[f"{kind}_scale"] = getattr(calibration, f"{kind}_scale")
            continue
        scale = median(s.seconds / s.estimate(bare, eased) for s in seen)
        before = median(abs(s.estimate(hardware, eased) / s.seconds - 1) for s in seen)
        after = median(abs(scale * s.estimate(bare, eased) / s.seconds - 1) for s in seen)
        scales[f"{kind}_scale"] = round(scale, 4)
        found.append(Adjusted(kind, len(seen), scale, before, after))
    if not found:
        raise InputError(
            f"the trace has fewer than {FEWEST} products, attentions or elementwise kernels of 10 us. Record "
            "a step of a larger model."
        )
    return replace(hardware, calibration=calibration.model_copy(update={**plain, **scales})), found
