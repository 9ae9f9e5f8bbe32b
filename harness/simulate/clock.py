"""The clock of a simulated GPU: a host that launches operators, a device that works them off in order, and
the link between their memories, one copy at a time in each direction.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from harness.formula import Times
from harness.hardware import Hardware
from harness.kernel_time import KernelKind, range_of, transfer
from harness.kernels import NOTHING, Cost, KernelClass, Step, operator_cost
from harness.recipe import Recipe
from harness.snapshot import by_kind_of_module
from harness.step_profile import PhaseStats, StepStats, TimeStats, utilization

Path = tuple[Any, ...]
"""A field of a clock, and the keys within it."""
_NUMBERS = (
    *("flops", "bytes_moved", "recomputed_flops", "communication_s", "kernels_s", "modules_s", "taken_s"),
    *("_kinds_s", "_waited", "_host_s", "_done_s", "_link_s", "_arrives_s", "_leaves_s"),
)


class SimulatedTime:
    """Seconds by harness/kernel_time. An operator starts when it is launched and the device is free; it takes
    the larger of what it computes and what it moves.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.phase = ""
        self.recomputing = False
        """Whether what is launched now repeats what forward has computed."""
        self.flops: dict[str, int] = defaultdict(int)
        self.bytes_moved: dict[str, int] = defaultdict(int)
        self.recomputed_flops = 0
        self.stream = 0
        """The stream that is given what is launched now."""
        self._host_s = 0.0
        self._done_s: dict[int, float] = {0: 0.0}
        """By stream: when it has done what it was given."""
        self._link_s = {"out": 0.0, "in": 0.0}
        self._arrives_s: dict[int, float] = {}
        """By storage: when the last copy over the link has written it."""
        self._leaves_s: dict[int, float] = {}
        """By storage: when the last copy over the link has read it."""
        self._waited = {"compute": 0.0, "memory": 0.0, "host": 0.0}
        self.communication_s: dict[str, float] = defaultdict(float)
        """By phase: in which the default stream communicated, or waited for a stream that did."""
        self.kernels_s: dict[str, dict[KernelClass, float]] = defaultdict(lambda: defaultdict(float))
        """By phase and class of kernel: how long the device was at work."""
        self.modules_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """By phase and path of the module: the same."""
        self.taken_s: dict[str, float] = {}
        """By phase of this step, from its beginning to when all is done that was given in it."""
        self._began_s = 0.0
        self._kinds_s: dict[str, dict[KernelKind, float]] = defaultdict(lambda: defaultdict(float))

    def begin_step(self) -> None:
        """Forget the step before: counters are of one step."""
        self.flops.clear()
        self.bytes_moved.clear()
        self.recomputed_flops = 0
        self.communication_s.clear()
        self.kernels_s.clear()
        self.modules_s.clear()
        self.taken_s.clear()
        self._kinds_s.clear()
        self._waited = dict.fromkeys(self._waited, 0.0)

    def begin_phase(self, name: str) -> None:
        """What is launched now belongs to it."""
        self.phase, self._began_s = name, self.now()

    def end_phase(self) -> None:
        """The phase is over; it may come again in the same step."""
        self.taken_s[self.phase] = self.taken_s.get(self.phase, 0.0) + self.now() - self._began_s

    def now(self) -> float:
        """When an event recorded now would fire."""
        return max(self._host_s, *self._done_s.values(), *self._link_s.values())

    def done_s(self, stream: int) -> float:
        """When `stream` has done what it was given so far."""
        return max(self._host_s, self._done_s.get(stream, 0.0))

    def wait(self, stream: int, moment_s: float) -> None:
        """What `stream` is given from now on begins at `moment_s` at the earliest."""
        waits_s = max(0.0, moment_s - self.done_s(stream))
        if stream == 0:
            self.communication_s[self.phase] += waits_s
        self._done_s[stream] = self.done_s(stream) + waits_s

    def communicate(self, seconds: float, stream: int) -> None:
        """A collective that takes so long was launched on `stream`, after what the current one was given."""
        self._host_s += self.hardware.calibration.host_op_s
        begins_s = max(self.done_s(stream), self.done_s(self.stream))
        self._done_s[stream] = begins_s + seconds
        if stream == 0:
            self.communication_s[self.phase] += seconds

    def host_waits_until(self, moment_s: float) -> None:
        """The host goes on at `moment_s`."""
        self._host_s = max(self._host_s, moment_s)

    def cost(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step] = ()
    ) -> Cost:
        """What one operator takes; `script` is what its kernels take from the allocator."""
        if not is_on_device(out, args):
            return NOTHING
        return operator_cost(self.hardware, func, args, kwargs, out, script)

    def launch(self, cost: Cost, reads: Iterable[int] = (), module: str = "") -> None:
        """One operator of `module` that takes `cost` was launched; it reads these storages, once they have
        arrived."""
        if cost is NOTHING:
            return
        flops, moved, compute_s, memory_s, before_s, kind, kernel_class = cost
        self._host_s += self.hardware.calibration.host_op_s
        self._device_waits_until(max(self._host_s, self._arrival(reads)))
        busy_s = max(compute_s, memory_s - before_s)
        self._done_s[self.stream] += before_s + busy_s
        if self.stream == 0:
            self._waited["memory"] += before_s
            self._waited["compute" if compute_s > memory_s - before_s else "memory"] += busy_s
        self._kinds_s[self.phase][kind] += before_s + busy_s
        self.modules_s[self.phase][module] += before_s + busy_s
        self.kernels_s[self.phase][kernel_class] += busy_s
        if before_s:
            self.kernels_s[self.phase]["dequantize"] += before_s
        self.bytes_moved[self.phase] += moved
        if flops:
            self.flops[self.phase] += flops
            if self.recomputing:
                self.recomputed_flops += flops

    def copy(self, size_bytes: int, to_host: bool, source: int, target: int, *, waits: bool) -> None:
        """A copy over the link was launched, between two storages. It begins when the device has done what
        it was given before. With `waits` the host goes on when it is over."""
        self._host_s += self.hardware.calibration.host_op_s
        way = "out" if to_host else "in"
        begins_s = max(self.done_s(self.stream), self._link_s[way], self._arrival([source]))
        ends_s = self._link_s[way] = begins_s + transfer(self.hardware, size_bytes)
        self._arrives_s[target] = ends_s
        if to_host:
            self._leaves_s[source] = ends_s
        if waits:
            self._host_s = ends_s
        self.bytes_moved[self.phase] += size_bytes

    def work_on_host(self, cost: Cost, reads: Iterable[int]) -> None:
        """The host itself works on tensors in its memory, once they have arrived."""
        self._host_s = max(self._host_s, self._arrival(reads))
        self._host_s += cost.bytes_moved / self.hardware.calibration.host_memory_bandwidth

    def freed(self, storage: int) -> None:
        """A storage is gone. Its memory is used again only when no copy reads it any more."""
        self._arrives_s.pop(storage, None)
        self._device_waits_until(self._leaves_s.pop(storage, 0.0))

    def _arrival(self, storages: Iterable[int]) -> float:
        return max((self._arrives_s.get(storage, 0.0) for storage in storages), default=0.0)

    def _device_waits_until(self, moment_s: float) -> None:
        before_s = self._done_s.get(self.stream, 0.0)
        self._done_s[self.stream] = max(before_s, moment_s)
        if self.stream == 0:
            self._waited["host"] += max(0.0, moment_s - before_s)

    def numbers(self) -> dict[Path, float]:
        """Moments and counters, each with where it stands."""
        return dict(_numbers({name: getattr(self, name) for name in _NUMBERS}))

    def advance(self, by: Mapping[Path, float], times: int) -> None:
        """Go on as if that which added `by` to the `numbers` had come so many times more."""
        for (name, *keys), added in by.items():
            if not keys:
                setattr(self, name, getattr(self, name) + times * added)
                continue
            holder = getattr(self, name)
            for key in keys[:-1]:
                holder = holder[key]
            holder[keys[-1]] += times * added

    def bound(self) -> Literal["compute", "memory", "host"]:
        """Where most of the step's time went."""
        return max(self._waited, key=lambda cause: self._waited[cause])  # type: ignore[return-value]

    def tell(self, stats: PhaseStats, phase: str, *, distributed: bool) -> None:
        """Note what a phase of this step has taken so far."""
        seconds = self.taken_s[phase]
        low, high = self.range_s(phase, seconds)
        stats.time_s = TimeStats(median=seconds, p10=low, p90=high)
        stats.kernels_s = {**self.kernels_s.get(phase, {})}
        stats.modules_s = {**by_kind_of_module(self.modules_s.get(phase, {}))}
        stats.flops, stats.bytes_moved = self.flops.get(phase, 0), self.bytes_moved.get(phase, 0)
        if distributed:
            stats.communication_s = self.communication_s.get(phase, 0.0)

    def range_s(self, phase: str, seconds: float) -> tuple[float, float]:
        """From what to what `seconds` of a phase may be: each kernel at the 10th or the 90th percentile of
        what such estimates are off by, all of a kind alike."""
        taken: dict[KernelKind, float] = dict(self._kinds_s[phase])
        taken["collective"] = self.communication_s.get(phase, 0.0)
        low = high = seconds
        for kind, each_s in taken.items():
            spread = range_of(self.hardware, kind)
            low += each_s * (spread.low - 1)
            high += each_s * (spread.high - 1)
        return max(0.0, min(low, seconds)), max(high, seconds)


def _numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, float]]:
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _numbers(inner, (*path, key))


def step_of(recipe: Recipe, clock: SimulatedTime) -> StepStats:
    """What a clock that heard the recorded step says of it."""
    taken = clock.taken_s.items()
    seconds = sum(taken_s for _, taken_s in taken)
    ranges = [clock.range_s(phase, taken_s) for phase, taken_s in taken]
    all_flops = sum(flops for phase, flops in clock.flops.items() if phase != "optimizer_step")
    model_flops = all_flops - clock.recomputed_flops
    peak = clock.hardware.peak_flops(recipe.compute_dtype)
    return StepStats(
        time_s=TimeStats(
            median=seconds, p10=sum(low for low, _ in ranges), p90=sum(high for _, high in ranges)
        ),
        tokens_per_s=recipe.global_tokens_per_step / seconds,
        model_flops=model_flops,
        mfu=utilization(model_flops, seconds, peak),
        hfu=utilization(all_flops, seconds, peak),
        bound=clock.bound(),
    )


def times_of(recipe: Recipe, clock: SimulatedTime) -> Times:
    """What a formula keeps of the recorded step's time."""
    kernels_s = {phase: {**found} for phase, found in clock.kernels_s.items()}
    return Times(step_of(recipe, clock), {**clock.communication_s}, kernels_s)


def is_on_device(out: Any, args: Any) -> bool:
    """Whether an operator ran on the device: where its result is, or else its first tensor."""
    for value in (out, *args):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Tensor):
            return first.device.type == "meta"
    return False
