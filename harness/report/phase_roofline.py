"""The phases of a step on the roofline of their device.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures" (CACM 52(4), 2009): FLOP/s over FLOPs per byte, under the device's two ceilings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.report.table import Cell, Table
from harness.step_profile import PHASES, StepProfile


class Point(NamedTuple):
    """A phase: its work and its time."""

    phase: str
    flops: int
    bytes_moved: int
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


@dataclass(frozen=True)
class PhaseRoofline:
    """The ceilings, from the datasheet, and the phases under them."""

    device: str
    peak_flops: float
    memory_bandwidth: float
    points: tuple[Point, ...]
    note: str

    def ceiling(self, intensity: float) -> float:
        """FLOP/s that the device allows at an intensity."""
        return min(self.peak_flops, intensity * self.memory_bandwidth)

    def table(self) -> Table:
        """What the picture shows, and the phases without FLOPs, which it cannot."""
        columns = (
            "phase",
            "FLOPs",
            "bytes moved",
            "intensity",
            "reached",
            "bytes/s",
            "of its ceiling",
            "time",
        )
        rows: list[tuple[Cell, ...]] = []
        for point in self.points:
            bandwidth = point.bytes_moved / point.seconds
            ceiling = self.ceiling(point.intensity)
            # without FLOPs, the only ceiling is that of the memory
            share = point.flops_per_s / ceiling if point.flops else bandwidth / self.memory_bandwidth
            rows.append(
                (
                    Cell(point.phase),
                    Cell(point.flops, "flops"),
                    Cell(point.bytes_moved, "bytes"),
                    Cell(point.intensity, "flop/byte"),
                    Cell(point.flops_per_s, "flop/s"),
                    Cell(bandwidth, "bytes/s"),
                    Cell(share, "share"),
                    Cell(point.seconds, "s"),
                )
            )
        return Table(f"Phases under the roofline of {self.device}", columns, rows, notes=[self.note])

    def data(self) -> dict[str, Any]:
        """For the scripts."""
        return {
            "device": self.device,
            "peak_flops": self.peak_flops,
            "bandwidth": self.memory_bandwidth,
            "points": [
                {"phase": point.phase, "intensity": point.intensity, "reached": point.flops_per_s}
                for point in self.points
                if point.flops
            ],
        }


def roofline_of(profile: StepProfile, answers: Sequence[StepProfile] = ()) -> PhaseRoofline | str:
    """The roofline of a profile, or why there is none.

    No GPU counts the bytes that its kernels move without a profiler, so those of a measured run come from
    the simulated or the napkin answer about the same recipe.
    """
    device = profile.hardware
    if not device.peak_flops or not device.memory_bandwidth:
        return f"Roofline: there is no datasheet of {device.name}."
    trusted = (profile, *sorted(answers, key=lambda answer: answer.source != "simulated"))
    moved = next((p for p in trusted if any(stats.bytes_moved for stats in p.phases.values())), None)
    if moved is None:
        return (
            "Roofline: nobody says how many bytes the phases move. A simulated answer beside this one would."
        )
    points: list[Point] = []
    for name in PHASES:
        stats, there = profile.phases.get(name), moved.phases.get(name)
        bytes_moved = there and there.bytes_moved
        if stats is not None and stats.flops is not None and bytes_moved and stats.time_s.median:
            points.append(Point(name, stats.flops, bytes_moved, stats.time_s.median))
    if not points:
        return "Roofline: the profile has no FLOPs or no times."
    whose = (
        ""
        if moved is profile
        else f"The bytes moved are the {moved.source} answer's, the rest is {profile.source}. "
    )
    note = (
        f"{whose}Ceilings are the datasheet's: {device.peak_flops / 1e12:,.4g} TFLOP/s dense in the recipe's "
        f"compute dtype, {device.memory_bandwidth / 1e9:,.4g} GB/s (GB = 1e9)."
    )
    return PhaseRoofline(device.name, device.peak_flops, device.memory_bandwidth, tuple(points), note)
