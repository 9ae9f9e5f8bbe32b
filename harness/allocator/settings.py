"""The CUDA caching allocator's settings, in the syntax of PYTORCH_CUDA_ALLOC_CONF. No torch.

The meaning of every option is that of c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.cpp in
PyTorch 2.11 to 2.15. Sizes are in bytes here; the options' own unit is MiB although their names say mb.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from harness.errors import InputError, nearest
from harness.system import FreeBlockOrder, TorchRelease, installed_version

MiB = 2**20
kSmallSize = 1 * MiB
"""The largest request served from the small pool."""
kSmallBuffer = 2 * MiB
"""The size of the small pool's segments."""
kMinLargeAlloc = 10 * MiB
"""A request of this size or more gets a segment of its own size."""
kLargeBuffer = 20 * MiB
"""The size of segments that smaller requests of the large pool share, unless large_segment_size_mb is set."""
kRoundUpPowerOfTwoIntervals = 16
"""roundup_power2_divisions has one entry per power of two: below 2 MiB, from 2 MiB, ..., from 32 GiB."""

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The environment variables that PyTorch reads. The first one that is set wins."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the allocator model. The defaults are PyTorch's."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    """Larger free blocks are neither split nor given to smaller requests. None: no limit."""
    large_segment_size_bytes: int = kLargeBuffer
    """The size of segments that requests below kMinLargeAlloc share in the large pool."""
    max_non_split_rounding_bytes: int | None = None
    """How much larger than an oversize request a free block may be. None: large_segment_size_bytes."""
    garbage_collection_threshold: float = 0.0
    """The fraction of the allowed memory beyond which unused segments are given back; 0: never. PyTorch does
    so only when per_process_memory_fraction is below 1."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * kRoundUpPowerOfTwoIntervals
    """By power of two: into how many parts it is divided, to a multiple of which a request is rounded up."""
    per_process_memory_fraction: float = 1.0
    """The fraction of the device's memory that the process may reserve."""
    free_block_order: FreeBlockOrder = "segment_counter"
    """What decides between equally large free blocks. The PyTorch version sets it, and no option does."""
    ignored: tuple[str, ...] = ()
    """The options that were given and that change nothing in this model."""

    @property
    def oversize_from_bytes(self) -> int:
        """Requests and blocks of at least so many bytes are oversize: see max_split_size_bytes."""
        return self.max_split_size_bytes or sys.maxsize

    @property
    def depend_on_memory(self) -> bool:
        """Whether the allocator does other things on a device with more memory though it is never refused
        any: the addresses of an expandable segment are 9/8 of the device's memory."""
        return self.expandable_segments or self.per_process_memory_fraction < 1


def settings_from_environment(environment: Mapping[str, str], torch_version: str = "2.13") -> Settings:
    """The settings that a CUDA process with this environment would have. Raises InputError."""
    for name in VARIABLES:
        if name in environment:
            return parse_settings(environment[name], torch_version, origin=name)
    return parse_settings("", torch_version)


def parse_settings(text: str, torch_version: str = "2.13", origin: str = VARIABLES[0]) -> Settings:
    """The settings in "key:value,key:value". Raises InputError, naming `origin`, the option and its values.

    It refuses what PyTorch refuses, and also text that PyTorch misreads (64abc as 64).
    """
    values: dict[str, str] = {}
    for key, value in _options(text, origin):
        if key not in _PARSERS and key not in _NEUTRAL:
            known = sorted([*_PARSERS, *_NEUTRAL])
            hint = nearest(key, known) or f" Known options: {', '.join(known)}."
            raise InputError(f"{origin}: unknown allocator option {key!r}.{hint}")
        if key in values:
            raise InputError(f"{origin}: {key} is given twice. Give it once.")
        if key in _NEUTRAL and (problem := _problem(key, value)):
            raise InputError(f"{origin}: {key}:{value} {problem}")
        values[key] = value
    fields: dict[str, Any] = {}
    # large_segment_size_mb first: the lower limits of two others are its value, wherever it stands.
    for key in sorted(values, key=lambda key: key != "large_segment_size_mb"):
        if key in _PARSERS:
            field, parse = _PARSERS[key]
            try:
                fields[field] = parse(values[key], fields)
            except ValueError as error:
                raise InputError(f"{origin}: {key}:{values[key]} is wrong, {error}.") from None
    ignored = tuple(key for key in values if key in _NEUTRAL)
    order = TorchRelease.of(torch_version).free_block_order
    return replace(Settings(free_block_order=order, ignored=ignored), **fields)


def _options(text: str, origin: str) -> list[tuple[str, str]]:
    """The options as (key, value), split at commas outside brackets. Like PyTorch it drops white space and
    allows one comma at the end."""
    text = re.sub(r"\s+", "", text)
    items = re.split(r",(?![^\[]*\])", text.removesuffix(",")) if text else []
    pairs: list[tuple[str, str]] = []
    for item in items:
        key, colon, value = item.partition(":")
        if not (key and colon and value):
            raise InputError(f"{origin}: {item!r} is not key:value. Write options as key:value,key:value.")
        pairs.append((key, value))
    return pairs


def _boolean(value: str, fields: dict[str, Any]) -> bool:
    if value not in ("True", "False"):
        raise ValueError("it takes True or False")
    return value == "True"


def _mebibytes(value: str, at_least: int) -> int:
    if not re.fullmatch(r"\d+", value) or not at_least <= int(value) < 2**44:
        raise ValueError(f"it takes a whole number of MiB, at least {at_least}")
    return int(value) * MiB


def _large_segment(value: str, fields: dict[str, Any]) -> int:
    return _mebibytes(value, at_least=kMinLargeAlloc // MiB + 1)


def _at_least_large_segment(value: str, fields: dict[str, Any]) -> int:
    return _mebibytes(value, at_least=fields.get("large_segment_size_bytes", kLargeBuffer) // MiB)


def _number(value: str, what: str, is_right: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not is_right(number):
        raise ValueError(f"it takes {what}")
    return number


def _threshold(value: str, fields: dict[str, Any]) -> float:
    return _number(value, "a number between 0 and 1, both excluded", lambda number: 0 < number < 1)


def _fraction(value: str, fields: dict[str, Any]) -> float:
    return _number(value, "a number from 0 to 1", lambda number: 0 <= number <= 1)


def _divisions(value: str, fields: dict[str, Any]) -> tuple[int, ...]:
    """The divisions of each power of two: for all sizes ("4"), or by size in MiB ("[256:1,512:2,>:8]").

    As in PyTorch the first size also covers everything below it, and ">" everything above the last size named
    before it (if there is none, above the first interval). A size left out in between is not rounded.
    """
    if not value.startswith("["):
        if not _is_power_of_two(value):
            raise ValueError("it takes a power of two, or a list like [256:1,512:2,>:8]")
        return (int(value),) * kRoundUpPowerOfTwoIntervals
    if not value.endswith("]"):
        raise ValueError("its list has no closing bracket")
    divisions = [0] * kRoundUpPowerOfTwoIntervals
    last, first = 0, True
    for item in filter(None, value[1:-1].split(",")):
        size, _, count = item.partition(":")
        if not (count == "0" or _is_power_of_two(count)) or not (size == ">" or _is_power_of_two(size)):
            raise ValueError(f"{item!r} is not size:divisions, powers of two both (0 divisions: no rounding)")
        if size == ">":
            divisions[last + 1 :] = [int(count)] * (kRoundUpPowerOfTwoIntervals - last - 1)
            continue
        last = min(int(size).bit_length() - 1, kRoundUpPowerOfTwoIntervals - 1)
        if first:
            divisions[:last] = [int(count)] * last
            first = False
        divisions[last] = int(count)
    return tuple(divisions)


def _is_power_of_two(text: str) -> bool:
    return bool(re.fullmatch(r"\d+", text)) and int(text).bit_count() == 1


def _problem(key: str, value: str) -> str | None:
    """Why the value of an option of _NEUTRAL is refused; None where it changes nothing."""
    match key, value:
        case "backend", "cudaMallocAsync":
            return (
                "cannot be simulated: that allocator is the CUDA driver's own, whose rules are not "
                "published. Use backend:native."
            )
        case "backend", other if other != "native":
            return "names no allocator. Use backend:native."
        case "throw_on_cudamalloc_oom", other if other != "False":
            return "cannot be simulated: it rejects requests before memory runs out. Drop it."
        case "expandable_segments_reserve" | "expandable_segments_reserve_by_class", _:
            return "cannot be simulated: it limits the address space of a segment. Drop it."
        case _:
            return None


_PARSERS = {  # by option: the field of Settings, and what reads its value
    "expandable_segments": ("expandable_segments", _boolean),
    "large_segment_size_mb": ("large_segment_size_bytes", _large_segment),
    "max_split_size_mb": ("max_split_size_bytes", _at_least_large_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _at_least_large_segment),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
}

_NEUTRAL = (  # options that change nothing here, but for the values that `_problem` refuses
    *("backend", "throw_on_cudamalloc_oom"),
    *("expandable_segments_reserve", "expandable_segments_reserve_by_class"),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse"),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads"),
    *("pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb"),
    *("pinned_max_cached_size_mb", "pinned_free_catch_all"),
)


def allocator_settings(environment: Mapping[str, str], text: str | None = None) -> Settings:
    """The settings in `text`, or else in the environment, for the installed torch. Raises InputError."""
    version = installed_version("torch") or "2.13"
    if text is not None:
        return parse_settings(text, version, origin="--allocator")
    return settings_from_environment(environment, version)
