"""The time of a training step: its phases, each with the device's work and what runs beside it or waits.
Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.hardware.roofline import Bound, Time, Work
from harness.step_profile import PhaseStats, StepStats, TimeStats


@dataclass(frozen=True)
class PhaseTime:
    """The time of one phase of an optimizer step, all micro batches together."""

    works: list[Work]
    time: Time
    transfer_s: float  # over the host link, while the device computes
    waited_s: float  # for transfers and the host's own work
    sent_bytes: float  # to other ranks
    sent_s: float
    exposed_s: float  # the part of sent_s that no computation hides

    @property
    def flops(self) -> int:
        return sum(work.flops for work in self.works)

    @property
    def bytes_moved(self) -> int:
        return sum(work.bytes_moved for work in self.works)

    def seconds_if(self, device_s: float) -> float:
        """The phase's seconds if the device works for `device_s`: the host and transfers work meanwhile, and
        waiting comes on top."""
        return max(device_s, self.time.host_s, self.transfer_s) + self.waited_s + self.exposed_s

    @property
    def seconds(self) -> float:
        return self.seconds_if(self.time.device_s)

    def stats(self, peak_allocated_bytes: int | None) -> PhaseStats:
        """The phase of a StepProfile."""
        taken = TimeStats(median=self.seconds)
        return PhaseStats(
            time_s=taken,
            peak_allocated_bytes=peak_allocated_bytes,
            flops=self.flops,
            bytes_moved=self.bytes_moved,
        )


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step."""

    phases: Mapping[str, PhaseTime]
    tokens: int
    """Of all ranks together."""
    recomputed_flops: int
    """What backward computes again, which MFU does not count."""
    peak_flops: float
    """FLOP/s that the device can do in the step's dtype."""

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def range_s(self) -> tuple[float, float]:
        """The step's seconds if estimates of such kernels err by their 10th or 90th percentile, all alike."""
        low, high = (sum(p.seconds_if(p.time.range_s[end]) for p in self.phases.values()) for end in (0, 1))
        return low, high

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def flops(self) -> int:
        """The FLOPs of forward and backward, with those that backward computes again."""
        return self.phases["forward"].flops + self.phases["backward"].flops

    @property
    def stats(self) -> StepStats:
        """The step's time, speed and use of the device."""
        taken, flops = TimeStats(median=self.seconds), {"forward and backward": self.flops}
        return StepStats.of(taken, self.tokens, flops, self.recomputed_flops, self.peak_flops, self.bound)

    @property
    def bound(self) -> Bound:
        """What most of the step waits for: matrix products, device memory, or the host and the links."""
        times = [phase.time for phase in self.phases.values()]
        busy, computing = sum(t.device_s for t in times), sum(t.computing_s for t in times)
        most = "compute" if computing > busy - computing else "memory"
        return "host" if self.seconds - busy > max(computing, busy - computing) else most
