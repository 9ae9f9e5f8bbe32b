"""The clock of a simulated GPU: a host that launches operators, a device that executes them in order, and the
link between their memories, with one copy at a time in each direction.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from harness.formula import Times
from harness.hardware import Hardware
from harness.kernel_time import KernelKind, PowerLimit, host_times, range_of, slow_host, transfer
from harness.kernels import NOTHING, Cost, KernelClass, Step, operator_cost
from harness.recipe import Recipe
from harness.snapshot import by_kind_of_module
from harness.step_profile import PhaseStats, StepStats, TimeStats

Path = tuple[Any, ...]
"""Where a number of a clock is: the name of a field, and the keys within it."""
_NUMBERS = (
    *("flops", "bytes_moved", "recomputed_flops", "communication_s", "kernels_s", "modules_s", "taken_s"),
    *("_kinds_s", "_waited", "_host_s", "_done_s", "_link_s", "_arrives_s", "_leaves_s", "_computing_s"),
    "host_works_s",
)
"""The fields of a clock that have its moments and counters."""


class SimulatedTime:
    """The moments and counters of one device, in seconds by harness/kernel_time since the run began.

    An operator starts when it has been launched and the device is free, and takes the larger of the time to
    compute and the time to move its bytes.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._host = host_times(hardware)
        self.phase = ""
        self.recomputing = False
        """Whether the operators that are launched now repeat what forward has computed."""
        self.flops: dict[str, int] = defaultdict(int)
        self.bytes_moved: dict[str, int] = defaultdict(int)
        self.recomputed_flops = 0
        self.stream = 0
        """The number of the CUDA stream on which operators are launched now."""
        self._host_s = 0.0
        """The moment that the host has reached."""
        self.host_works_s: dict[str, float] = defaultdict(float)
        """By phase: how long the host was at work, on operators and Python, and not waiting."""
        self._done_s: dict[int, float] = {0: 0.0}
        """The moment at which each stream has executed everything that was launched on it."""
        self._link_s = {"out": 0.0, "in": 0.0}
        """The moment at which each direction of the link is free; `out` is from the device to the host."""
        self._arrives_s: dict[int, float] = {}
        """By storage: the moment at which the last copy over the link has written it."""
        self._leaves_s: dict[int, float] = {}
        """By storage: the moment at which the last copy over the link has read it."""
        self._waited = {"compute": 0.0, "memory": 0.0, "host": 0.0}
        """How long the step took because of each of these."""
        self.communication_s: dict[str, float] = defaultdict(float)
        """By phase: the time in which the default stream communicated, or waited for a stream that did."""
        self.kernels_s: dict[str, dict[KernelClass, float]] = defaultdict(lambda: defaultdict(float))
        """By phase and class of kernel: the time that the device worked."""
        self.modules_s: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        """By phase and path of the module: the time that the device worked."""
        self.taken_s: dict[str, float] = {}
        """By phase of this step: the time from its beginning until everything launched in it is done."""
        self._began_s = 0.0
        """The moment at which the present phase began."""
        self._kinds_s: dict[str, dict[KernelKind, float]] = defaultdict(lambda: defaultdict(float))
        """By phase and kind of kernel (whose estimates err alike): the time that the device worked."""
        self._computing_s = 0.0
        """The time of this step in products that the device's power limit may slow down."""
        self._power = PowerLimit(hardware)

    def begin_step(self) -> None:
        """Set the counters to zero, since they are those of one step."""
        self._power.after_step(self._computing_s, sum(self.taken_s.values()))
        self._computing_s = 0.0
        self.flops.clear()
        self.bytes_moved.clear()
        self.recomputed_flops = 0
        self.communication_s.clear()
        self.kernels_s.clear()
        self.modules_s.clear()
        self.taken_s.clear()
        self.host_works_s.clear()
        self._kinds_s.clear()
        self._waited = dict.fromkeys(self._waited, 0.0)

    def begin_phase(self, name: str) -> None:
        """Begin a phase: what is launched from now on belongs to it."""
        self.phase, self._began_s = name, self.now()

    def end_phase(self) -> None:
        """End the phase, which may come again in the same step, and add to its time."""
        self.taken_s[self.phase] = self.taken_s.get(self.phase, 0.0) + self.now() - self._began_s

    def now(self) -> float:
        """The moment at which everything that was launched so far is done."""
        return max(self._host_s, *self._done_s.values(), *self._link_s.values())

    def done_s(self, stream: int) -> float:
        """The moment at which `stream` has executed everything that was launched on it so far."""
        return max(self._host_s, self._done_s.get(stream, 0.0))

    def wait(self, stream: int, moment_s: float) -> None:
        """Let what is launched on `stream` from now on begin at `moment_s` at the earliest."""
        waits_s = max(0.0, moment_s - self.done_s(stream))
        if stream == 0:
            self.communication_s[self.phase] += waits_s
        self._done_s[stream] = self.done_s(stream) + waits_s

    def communicate(self, seconds: float, stream: int) -> None:
        """Launch a collective that takes `seconds` on `stream`. It begins after everything that was launched
        on the current stream."""
        self._host_works(self._host.launch)
        begins_s = max(self.done_s(stream), self.done_s(self.stream))
        self._done_s[stream] = begins_s + seconds
        if stream == 0:
            self.communication_s[self.phase] += seconds

    def host_called(self, functions: int) -> None:
        """Let the host go on by the time of so many calls of Python functions."""
        self._host_works(functions * self._host.call)

    def host_viewed(self) -> None:
        """Let the host go on by the time of one operator that makes a view."""
        self._host_works(self._host.view)

    def _host_works(self, seconds: float) -> None:
        self._host_s += seconds
        self.host_works_s[self.phase] += seconds

    def host_waits_until(self, moment_s: float) -> None:
        """Let the host go on at `moment_s` at the earliest."""
        self._host_s = max(self._host_s, moment_s)

    def cost(
        self, func: Any, args: Any, kwargs: dict[str, Any], out: Any, script: Sequence[Step] = ()
    ) -> Cost:
        """The cost of an operator with result `out`; `script` is what its kernels allocate and free."""
        if not is_on_device(out, args):
            return NOTHING
        return operator_cost(self.hardware, func, args, kwargs, out, script)

    def launch(
        self, cost: Cost, reads: Sequence[int] = (), module: str = "", held_share: float | None = None
    ) -> None:
        """Launch one operator of `module` that takes `cost`. It begins when the storages that it `reads` have
        arrived over the link. `held_share`: of the bytes that it moves, which the L2 cache holds; None: as in
        a benchmark that repeats it."""
        if cost is NOTHING:
            self._host_works(self._host.operator)
            return
        flops, moved, compute_s, memory_s, before_s, kind, kernel_class, held_s, missed_s, at_limit = cost
        if at_limit:
            compute_s *= self._power.factor
            self._computing_s += compute_s
        if missed_s and held_share is not None:
            memory_s = missed_s - held_share * (missed_s - held_s)
        self._host_works(self._host.launch)
        if kind == "product":
            self._host_works(self._host.product)
        phase, begins_s = self.phase, max(self._host_s, self._arrival(reads)) if reads else self._host_s
        busy_s = max(compute_s, memory_s - before_s)
        taken_s = before_s + busy_s
        self._device_waits_until(begins_s)
        self._done_s[self.stream] += taken_s
        if self.stream == 0:
            self._waited["memory"] += before_s
            self._waited["compute" if compute_s > memory_s - before_s else "memory"] += busy_s
        self._kinds_s[phase][kind] += taken_s
        self.modules_s[phase][module] += taken_s
        kernels_s = self.kernels_s[phase]
        kernels_s[kernel_class] += busy_s
        if before_s:
            kernels_s["dequantize"] += before_s
        self.bytes_moved[phase] += moved
        if flops:
            self.flops[phase] += flops
            if self.recomputing:
                self.recomputed_flops += flops

    def copy(
        self, size_bytes: int, to_host: bool, source: int, target: int, *, beside: bool, waits: bool
    ) -> None:
        """Launch a copy over the link from the storage `source` to the storage `target`. It begins when the
        device has executed what was launched before, and the current stream waits for its end, unless it runs
        `beside`. With `waits` the host waits, too."""
        self._host_works(self._host.launch)
        direction = "out" if to_host else "in"
        begins_s = max(self.done_s(self.stream), self._link_s[direction], self._arrival([source]))
        ends_s = self._link_s[direction] = begins_s + transfer(self.hardware, size_bytes)
        self._arrives_s[target] = ends_s
        if to_host:
            self._leaves_s[source] = ends_s
        if waits:
            self._host_s = ends_s
        if not beside:
            self._device_waits_until(ends_s)
        self.bytes_moved[self.phase] += size_bytes

    def work_on_host(self, cost: Cost, reads: Iterable[int]) -> None:
        """Let the host itself work on tensors in its memory, once the storages that it `reads` have
        arrived."""
        self._host_s = max(self._host_s, self._arrival(reads))
        self._host_s += cost.bytes_moved / self.hardware.calibration.host_memory_bandwidth

    def freed(self, storage: int) -> None:
        """Note that a storage was freed. The device waits until no copy reads it any more, since its memory
        may be used again at once."""
        self._arrives_s.pop(storage, None)
        if storage in self._leaves_s:
            self._device_waits_until(self._leaves_s.pop(storage))

    def _arrival(self, storages: Iterable[int]) -> float:
        """The moment at which all these storages have arrived over the link."""
        return max((self._arrives_s.get(storage, 0.0) for storage in storages), default=0.0)

    def _device_waits_until(self, moment_s: float) -> None:
        """Let the current stream go on at `moment_s` at the earliest."""
        before_s = self._done_s.setdefault(self.stream, 0.0)
        if moment_s > before_s:
            self._done_s[self.stream] = moment_s
            if self.stream == 0:
                self._waited["host"] += moment_s - before_s

    def numbers(self) -> dict[Path, float]:
        """All moments and counters, by where they are."""
        return dict(_numbers({name: getattr(self, name) for name in _NUMBERS}))

    def advance(self, by: Mapping[Path, float], times: int) -> None:
        """Go on as if work that added `by` to the `numbers` had been done `times` times more."""
        for (name, *keys), added in by.items():
            if not keys:
                setattr(self, name, getattr(self, name) + times * added)
                continue
            holder = getattr(self, name)
            for key in keys[:-1]:
                holder = holder[key]
            holder[keys[-1]] += times * added

    def bound(self) -> Literal["compute", "memory", "host"]:
        """What most of the step's time went into."""
        return max(self._waited, key=lambda cause: self._waited[cause])  # type: ignore[return-value]

    def tell(self, stats: PhaseStats, phase: str, *, distributed: bool) -> None:
        """Write into `stats` what a phase of this step has taken so far."""
        seconds = self.taken_s[phase]
        low, high = self.range_s(phase, seconds)
        stats.time_s = TimeStats(median=seconds, p10=low, p90=high)
        stats.kernels_s = {**self.kernels_s.get(phase, {})}
        stats.modules_s = {**by_kind_of_module(self.modules_s.get(phase, {}))}
        stats.flops, stats.bytes_moved = self.flops.get(phase, 0), self.bytes_moved.get(phase, 0)
        if distributed:
            stats.communication_s = self.communication_s.get(phase, 0.0)

    def range_s(self, phase: str, seconds: float) -> tuple[float, float]:
        """The range that the `seconds` of a phase are in: that of its kernels, and up to what a slow host
        would take, if its speed is not known."""
        low, high = self.kernels_range_s(phase, seconds)
        return low, max(high, self.host_works_s[phase] * slow_host(self.hardware))

    def kernels_range_s(self, phase: str, seconds: float) -> tuple[float, float]:
        """The same with each kernel at the 10th, and at the 90th, percentile of the error of such estimates,
        all kernels of a kind alike."""
        taken: dict[KernelKind, float] = dict(self._kinds_s[phase])
        taken["collective"] = self.communication_s.get(phase, 0.0)
        low = high = seconds
        for kind, each_s in taken.items():
            spread = range_of(self.hardware, kind)
            low += each_s * (spread.low - 1)
            high += each_s * (spread.high - 1)
        return max(0.0, min(low, seconds)), max(high, seconds)


def _numbers(value: Any, path: Path = ()) -> Iterator[tuple[Path, float]]:
    """Every number in nested dicts, with its path."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from _numbers(inner, (*path, key))


def step_of(recipe: Recipe, clock: SimulatedTime) -> StepStats:
    """The times of the recorded step by a clock that ran with it."""
    ranges = [clock.range_s(phase, taken_s) for phase, taken_s in clock.taken_s.items()]
    low, high = (sum(ends) for ends in zip(*ranges, strict=True))
    taken = TimeStats(median=sum(clock.taken_s.values()), p10=low, p90=high)
    peak = clock.hardware.peak_flops(recipe.compute_dtype)
    tokens = recipe.global_tokens_per_step
    return StepStats.of(taken, tokens, clock.flops, clock.recomputed_flops, peak, clock.bound())


def times_of(recipe: Recipe, clock: SimulatedTime) -> Times:
    """The recorded step's times as a formula keeps them."""
    kernels_s = {phase: {**found} for phase, found in clock.kernels_s.items()}
    return Times(step_of(recipe, clock), {**clock.communication_s}, kernels_s)


def is_on_device(out: Any, args: Any) -> bool:
    """Whether an operator ran on the device, which is where its result is, or else its first tensor."""
    for value in (out, *args):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, Tensor):
            return first.device.type == "meta"
    return False
