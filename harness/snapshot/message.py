"""Explains PyTorch's out-of-memory message, for a run of which nothing else is left.

It follows `OutOfMemoryError` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 1.11 to 2.15. Imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harness.errors import InputError
from harness.units import in_gib

_BEGIN = "out of memory. Tried to allocate"
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_DEVICE = re.compile(r"\bGPU (\d+)\b")
_TOTAL = re.compile(rf"total capac\w+ of {_SIZE}|{_SIZE} total capacity")  # "capacty" in 2.1 and 2.2
_FREE = re.compile(rf"of which {_SIZE} is free|{_SIZE} free;")
_PROCESS = re.compile(rf"this process has {_SIZE} memory in use")
_OTHERS = re.compile(rf"\bProcess \d+ has {_SIZE} memory in use")
_LIMIT = re.compile(rf"{_SIZE} allowed")
_ALLOCATED = re.compile(rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated")
_PRIVATE = re.compile(rf"with {_SIZE} allocated in private pools")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_RANK = re.compile(r"^\[?rank\s?\d+\]?:\s?", re.MULTILINE)
"""What torchrun puts in front of a rank's lines."""


@dataclass(frozen=True)
class OutOfMemoryMessage:
    """The bytes that a message states, rounded there to hundredths of a unit; None where it is silent."""

    requested_bytes: int
    rounding_bytes: float
    """By how much the difference of free and requested bytes may be off, from rounding alone."""
    device: int | None
    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int | None
    unallocated_bytes: int | None
    """Reserved by PyTorch and not allocated."""
    private_bytes: int | None
    """The part of the allocated bytes that lies in private pools."""
    process_bytes: int | None
    others_bytes: int
    """What other processes on the device hold."""
    limit_bytes: int | None
    """What the process is allowed to take."""


def requested_in(message: str) -> int | None:
    """The requested bytes that a message states, as it rounds them; None where it states none."""
    asked = _ASKED.search(message)
    return None if asked is None else _bytes(asked)


def read_message(text: str) -> OutOfMemoryMessage:
    """The last out-of-memory message in `text`, which may be a whole log. Raises InputError for none."""
    last = " ".join(_RANK.sub("", text[text.rfind(_BEGIN) :]).split()) if _BEGIN in text else ""
    last = last[: 1 + last.find("If reserved") or None]  # the program's own output follows
    requested = requested_in(last)
    if requested is None:
        if re.search("CUDA error: out of memory|_ALLOC_FAILED|NCCL.*out of memory", text):
            raise InputError(
                "it is of CUDA or a library of it, and not of PyTorch's allocator, so it has no sizes. What "
                "PyTorch and other processes (`nvidia-smi` lists them) held left no room beside it: less "
                "must be reserved at that moment, or the others ended."
            )
        raise InputError(
            'there is no out-of-memory of PyTorch in it. It begins with "CUDA out of memory. Tried to '
            'allocate". Give the whole message, or the log that holds it.'
        )

    def size(pattern: re.Pattern[str]) -> int | None:
        found = pattern.search(last)
        return None if found is None else _bytes(found)

    counted = [_ASKED, _FREE, *((_RESERVED, _ALLOCATED) if _RESERVED.search(last) else (_UNALLOCATED,))]
    units = [found[0].split()[-1] for one in counted if (found := re.search(_SIZE, _matched(one, last)))]
    allocated, unallocated, reserved = size(_ALLOCATED), size(_UNALLOCATED), size(_RESERVED)
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    device = _DEVICE.search(last)
    process = size(_PROCESS)
    others = sorted(int(float(number) * _UNITS[unit]) for number, unit in _OTHERS.findall(last))
    if process is None and others and others[-1] >= (allocated or 0) + (unallocated or 0):
        process = others.pop()  # this process: in a container its id is not the one that the driver knows
    return OutOfMemoryMessage(
        requested_bytes=requested,
        rounding_bytes=sum(_UNITS[unit] * 0.005 for unit in units if unit != "bytes"),
        device=None if device is None else int(device[1]),
        total_bytes=size(_TOTAL),
        free_bytes=size(_FREE),
        allocated_bytes=allocated,
        unallocated_bytes=unallocated,
        private_bytes=size(_PRIVATE),
        process_bytes=process,
        others_bytes=sum(others),
        limit_bytes=size(_LIMIT),
    )


def message_in_words(message: OutOfMemoryMessage) -> Iterator[str]:
    """What happened, who had the memory, what would help, and what only a snapshot tells; a sentence each."""
    where = "the device" if message.device is None else f"GPU {message.device}"
    asked = f"Memory ran out: {in_gib(message.requested_bytes)} were asked for"
    if message.free_bytes is None:
        yield f"{asked}."
    else:
        size = "" if message.total_bytes is None else f" of {in_gib(message.total_bytes)}"
        yield f"{asked}, and {where} had {in_gib(message.free_bytes)}{size} left."
    allocated, unallocated = message.allocated_bytes, message.unallocated_bytes
    if allocated is not None and unallocated is not None:
        private = (
            f", {in_gib(message.private_bytes)} of that in private pools (CUDA graphs)"
            if message.private_bytes
            else ""
        )
        yield (
            f"PyTorch held {in_gib(allocated + unallocated)} in segments: {in_gib(allocated)} "
            f"allocated{private}, and {in_gib(unallocated)} free in pieces."
        )
        if message.process_bytes is not None:
            outside = max(0, message.process_bytes - allocated - unallocated)
            yield f"The process held {in_gib(outside)} beside it: the CUDA context, NCCL, libraries."
    if message.others_bytes:
        yield f"Other processes on it held {in_gib(message.others_bytes)}: end them, or take another GPU."
    yield _remedy(message)
    yield (
        "Where steps before it went well, this one had a longer row (`harness fit RECIPE --data FILE`), an "
        "evaluation came between (`harness simulate RECIPE --phases train,eval`), or something was kept from "
        "each step (`harness watch -- COMMAND`)."
    )
    yield (
        "Who held the memory, and in which pieces, the message does not say. A snapshot does: "
        "torch.cuda.memory._record_memory_history() before the model is made and _dump_snapshot(FILE) where "
        "the error is caught, then `harness snapshot show FILE`; or, without a GPU, `harness watch --gpu "
        "NAME -- COMMAND`."
    )


def _remedy(message: OutOfMemoryMessage) -> str:
    if message.limit_bytes is not None:
        return (
            f"The process is allowed {in_gib(message.limit_bytes)} "
            "(torch.cuda.set_per_process_memory_fraction): raise the limit, or allocate less."
        )
    if message.free_bytes is None or message.unallocated_bytes is None:
        return "Whether the free pieces would have been enough, the message does not say."
    room = message.free_bytes + message.unallocated_bytes
    missing = message.requested_bytes - room
    if message.free_bytes - message.requested_bytes > message.rounding_bytes:
        return (
            "The device had room: a limit of the process refused it, or another process took the memory and "
            "gave it back."
        )
    if abs(missing) <= message.rounding_bytes:
        return (
            f"With every free piece joined there were {in_gib(room)}, as much as was asked for: the message "
            "is too rounded to say whether it would have been enough. Try "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
        )
    if missing > 0:
        return (
            f"It was full and not in pieces: {in_gib(missing)} were missing even with every free piece "
            "joined, so no setting of the allocator finds them. Less must be allocated at this moment."
        )
    return (
        f"It was in pieces: {in_gib(room)} were free in all. "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins pieces, except those of small tensors and of "
        "other streams; a snapshot says how many they are."
    )


def _matched(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return "" if found is None else found[0]


def _bytes(found: re.Match[str]) -> int:
    number, unit = (group for group in found.groups() if group is not None)
    return int(float(number) * _UNITS[unit])
