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
    """A phase of the step as a point under the roofline."""

    phase: str
    flops: int
    bytes_moved: int
    """The bytes that the phase's kernels read and write in the device's memory."""
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes_moved

    @property
    def flops_per_s(self) -> float:
        """The FLOP/s that the phase reaches."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class PhaseRoofline:
    """The device's two ceilings, from its datasheet, and the phases under them."""

    device: str
    peak_flops: float
    """The dense FLOP/s of the recipe's compute dtype."""
    memory_bandwidth: float
    """The bandwidth of the device's memory, in bytes per second."""
    points: tuple[Point, ...]
    note: str
    """A sentence on where the ceilings and the bytes moved come from."""

    def ceiling(self, intensity: float) -> float:
        """The most FLOP/s at an intensity in FLOPs per byte moved."""
        return min(self.peak_flops, intensity * self.memory_bandwidth)

    def table(self) -> Table:
        """The phases as a table, with those without FLOPs, which the picture cannot show."""
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
            # the memory's bandwidth is the only ceiling of a phase without FLOPs
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
        """What the page's scripts draw."""
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
    """The roofline of a profile, or a sentence on why there is none.

    A GPU counts the bytes that its kernels move only under a profiler, so the bytes of a measured run are
    taken from the simulated or the napkin answer about the same recipe.
    """
    device = profile.hardware
    if not device.peak_flops or not device.memory_bandwidth:
        return f"Roofline: there is no datasheet of {device.name}."
    simulated_first = (profile, *sorted(answers, key=lambda answer: answer.source != "simulated"))
    moved = next((p for p in simulated_first if any(stats.bytes_moved for stats in p.phases.values())), None)
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
