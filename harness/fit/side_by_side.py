"""The strategies that divide a recipe among GPUs, as a table and as plain data. No torch of its own."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from harness.fit.sharding import Refused, Sharded, bucket_note, strategies
from harness.hardware import GPUS_PER_NODE, Hardware
from harness.napkin import estimate, warnings_of
from harness.recipe import Recipe
from harness.step_profile import NCCL_COMMUNICATOR
from harness.units import GIB, in_gib

ROW = "  {:<15} {:>6} {:>6} {:>6} {:>7} {:>7} {:>7} {:>8} {:>8}"
"""The heading and each row of the table."""


@dataclass(frozen=True)
class Divisions:
    """What each GPU holds and sends in a step, by strategy. Printed, it is the output of `harness shard`."""

    name: str
    gpus: int
    hardware: Hardware
    rows: list[Sharded | Refused]
    warnings: list[str]
    """Warnings about the recipe."""

    def as_json(self) -> dict[str, Any]:
        """The rows and warnings as plain data."""
        return {
            "strategies": [asdict(row) for row in self._divided],
            "refused": {row.strategy: row.reason for row in self.rows if isinstance(row, Refused)},
            "warnings": self.warnings,
        }

    def __str__(self) -> str:
        return "\n".join((*self._table(), *self._notes()))

    @property
    def _divided(self) -> list[Sharded]:
        return [row for row in self.rows if isinstance(row, Sharded)]

    def _table(self) -> Iterator[str]:
        where = f"{self.gpus} × {self.hardware.datasheet.title}"
        yield f"{self.name} on {where}: GiB a GPU, of one optimizer step\n"
        yield ROW.format(
            *("strategy", "params", "grads", "optim.", "peak", "sent", "link ms", "waits ms", "tokens/s")
        )
        for row in self.rows:
            if isinstance(row, Refused):
                yield f"  {row.strategy:<15} not with this recipe"
                continue
            states = (row.states.parameters, row.states.gradients, row.states.optimizer)
            sizes = (f"{size / GIB:.2f}" for size in (*states, row.peak_bytes, row.sent_bytes))
            times = (f"{seconds * 1e3:.1f}" for seconds in (row.link_s, row.exposed_s))
            speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
            yield ROW.format(row.strategy, *sizes, *times, speed)

    def _notes(self) -> Iterator[str]:
        """Lines about what the numbers rest on, and what they leave out."""
        yield ""
        there, beyond = self.hardware.memory_bytes, [row.strategy for row in self._divided if not row.fits]
        yield f"does not fit in the {in_gib(there)} of a GPU: {', '.join(beyond) or 'none'}"
        overlaps: dict[str, list[str]] = {}
        for row in self._divided:
            overlaps.setdefault(row.overlap, []).append(row.strategy)
        yield "waits ms: what of the link's time no computing hides"
        for overlap, names in overlaps.items():
            yield f"  {', '.join(names)}: {overlap}"
        simulated = [row.strategy for row in self._divided if row.source == "simulated"]
        if simulated:
            names = ", ".join(simulated)
            yield f"simulated, peak, waits and tokens/s of all GPUs: {names}; all else is arithmetic"
        yield "peak, allocated by PyTorch:"
        for row in self._divided:
            if row.where:
                yield f"  {row.strategy} peaks {'in' if row.source == 'simulated' else 'at'}: {row.where}"
            if row.host_bytes:
                yield f"  {row.strategy} keeps {in_gib(row.host_bytes)} a GPU in host memory"
            if row.buffers:
                yield f"  {row.strategy} holds DeepSpeed's {row.buffers}"
        if note := bucket_note(self.rows):
            yield f"  {note}"
        for row in self.rows:
            if isinstance(row, Refused):
                yield f"  {row.strategy}: {row.reason}"
            elif row.not_simulated:
                yield f"  {row.strategy} is by arithmetic, since it cannot be simulated: {row.not_simulated}"
        if self.gpus > 1:
            low, high = (size / GIB for size in NCCL_COMMUNICATOR)
            yield f"Beside it NCCL takes {low:.1f} to {high:.1f} GiB for each communicator, which no row has."


def divisions(
    name: str,
    recipe: Recipe,
    hardware: Hardware,
    gpus: int,
    group: int = GPUS_PER_NODE,
    told: Callable[[str], None] = lambda line: None,
) -> Divisions:
    """Every strategy on `gpus` GPUs, as `strategies` finds them. Raises InputError."""
    rows = strategies(estimate(recipe, hardware), gpus, group, told)
    return Divisions(name, gpus, hardware, rows, warnings_of(recipe))
