"""Which devices a snapshot tells of, and the one to look at. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import InputError
from harness.units import in_gib


@dataclass(frozen=True)
class Device:
    """What a snapshot has of one device."""

    index: int
    entries: int
    """Of its trace."""
    reserved_bytes: int
    """In segments, when the snapshot was taken."""
    ran_out: bool
    """Whether its trace has an out-of-memory."""

    def __str__(self) -> str:
        ran_out = ", ran out of memory" if self.ran_out else ""
        return f"{self.index} ({self.entries:,} entries, {in_gib(self.reserved_bytes)} reserved{ran_out})"


def devices_in(snapshot: Mapping[str, Any]) -> list[Device]:
    """The devices with a trace or a segment, by index."""
    traces = snapshot["device_traces"]
    reserved: dict[int, int] = {}
    for segment in snapshot["segments"]:
        index = segment.get("device", 0)
        reserved[index] = reserved.get(index, 0) + segment["total_size"]
    found = {index for index, trace in enumerate(traces) if trace} | reserved.keys()
    return [
        Device(
            index,
            len(trace := traces[index] if 0 <= index < len(traces) else []),
            reserved.get(index, 0),
            any(entry["action"] == "oom" for entry in trace),
        )
        for index in sorted(found)
    ]


def chosen_device(snapshot: Mapping[str, Any], wanted: int | None = None) -> int:
    """The device `wanted`; otherwise one that ran out of memory, then the busiest, then the fullest; else 0.

    Raises InputError, naming the devices there are, for one that the snapshot does not tell of.
    """
    devices = devices_in(snapshot)
    if wanted is not None and wanted not in [device.index for device in devices]:
        there = ", ".join(map(str, devices)) or "none"
        raise InputError(f"the snapshot tells nothing of device {wanted}. It has these devices: {there}.")
    if wanted is not None:
        return wanted
    best = max(devices, key=lambda d: (d.ran_out, d.entries, d.reserved_bytes, -d.index), default=None)
    return 0 if best is None else best.index


def trace_of(snapshot: Mapping[str, Any], device: int) -> list[dict[str, Any]]:
    """The trace of a device; empty where it has none."""
    traces = snapshot["device_traces"]
    return traces[device] if 0 <= device < len(traces) else []


def segments_of(snapshot: Mapping[str, Any], device: int) -> list[dict[str, Any]]:
    """The segments of a device; one that states none is device 0's, where all were once."""
    return [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
