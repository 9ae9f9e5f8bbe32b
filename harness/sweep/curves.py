"""What a sweep shows: memory and throughput against the swept field, the line through the memory, the value
at which it runs out, and the answer in a sentence. Every number is computed from the cells. Imports no torch.
"""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.step_profile import Fields, StepProfile, change_of_time_in_words
from harness.sweep.plan import HARDWARE, Plan, spelled
from harness.sweep.processes import Row
from harness.units import in_gib, in_ms

TOKEN_FIELDS = ("micro_batch_size", "seq_len")
"""Fields for which a line is fitted: a constant, and so many bytes for each token of the micro batch."""
GOOD_FIT = 0.999
"""With R² below this the memory is not a line: eager attention, for example, grows with seq_len squared."""
FLAT = 0.1
"""Throughput that grows with less than this power of the field counts as flat: doubling gives < 1.07x."""


@dataclass(frozen=True)
class Point:
    """One cell on a curve."""

    value: Any
    row: Row
    place: int
    """The index of its cell in the sweep's."""

    @property
    def profile(self) -> StepProfile | None:
        """The profile of a cell that went well; None for others."""
        return self.row.outcome.profile if self.row.outcome.status == "ok" else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.profile.step.tokens_per_s if self.profile is not None else None

    @property
    def peak_bytes(self) -> int | None:
        """The peak of allocated bytes; None for a cell that did not go well."""
        return self.profile.memory.peak_allocated_bytes if self.profile is not None else None


class Line(Fields):
    """A fit by least squares: peak allocated bytes = constant + per_token · tokens of a micro batch."""

    constant_bytes: float
    per_token_bytes: float
    r_squared: float
    largest_residual_bytes: float
    tokens_per_unit: float
    """How many tokens of a micro batch one unit of the field adds."""
    full_at: float | None
    """The field's value at which the line reaches the device's memory less the CUDA context."""
    good: bool
    """Whether R² is GOOD_FIT at least."""


class SweptCurve(Fields):
    """The cells in which one field changes and all others stay."""

    field: str
    others: dict[str, Any]
    """The values of the other swept fields; empty when one field changes at a time."""
    numeric: bool
    cells: list[int]
    """The indices of its cells in the sweep's: numbers ascending, other values as given, the base first."""
    line: Line | None
    """The line through the memory, for TOKEN_FIELDS with three values or more that went well."""
    largest_fitting: float | None
    smallest_out_of_memory: float | None
    answer: str
    """What the curve shows, in words; empty when no cell went well."""


def curves_of(plan: Plan, rows: Sequence[Row]) -> list[SweptCurve]:
    """The curve of every swept field; with a grid, one for each combination of the other fields."""
    found: list[SweptCurve] = []
    for field in plan.axes:
        groups: dict[str, list[Point]] = {}
        for place, row in enumerate(rows):
            others = {name: value for name, value in row.cell.changes.items() if name != field}
            if plan.grid or not others:
                value = row.cell.changes.get(field, {**plan.base, HARDWARE: plan.hardware}.get(field))
                groups.setdefault(json.dumps(others), []).append(Point(value, row, place))
        found += [_curve(field, json.loads(others), points) for others, points in groups.items()]
    return found


def _curve(field: str, others: dict[str, Any], points: list[Point]) -> SweptCurve:
    numeric = all(_is_number(point.value) for point in points)
    if numeric:
        points.sort(key=lambda point: point.value)
    line = _line(field, points)
    fits, fails = _border(points) if numeric else (None, None)
    return SweptCurve(
        field=field,
        others=others,
        numeric=numeric,
        cells=[point.place for point in points],
        line=line,
        largest_fitting=fits,
        smallest_out_of_memory=fails,
        answer=_answer(field, others, points, line),
    )


def _border(points: Sequence[Point]) -> tuple[Any, Any]:
    """The largest value that went well and the smallest that ran out of memory; None for none."""
    fits = max((p.value for p in points if p.profile is not None), default=None)
    return fits, min((p.value for p in points if p.row.outcome.status == "out_of_memory"), default=None)


def _answer(field: str, others: dict[str, Any], points: Sequence[Point], line: Line | None) -> str:
    """What the curve shows of throughput and memory, in a sentence or two; empty when no cell went well."""
    if all(_is_number(point.value) and point.value > 0 for point in points):
        sentences = [_throughput(field, points), _memory(field, points, line)]
    else:
        sentences = [_compared(field, points)]
    text = ". ".join(sentence for sentence in sentences if sentence)
    where = ", ".join(f"{name}={spelled(value)}" for name, value in others.items())
    return f"{f'With {where}: ' if where else ''}{text}." if text else ""


def _line(field: str, points: Sequence[Point]) -> Line | None:
    known = [p for p in points if p.peak_bytes is not None and p.profile is not None]
    if field not in TOKEN_FIELDS or len(known) < 3:
        return None
    xs = [_tokens(p) for p in known]
    ys = [float(p.peak_bytes or 0) for p in known]
    slope, constant = statistics.linear_regression(xs, ys)
    residuals = [y - (constant + slope * x) for x, y in zip(xs, ys, strict=True)]
    spread = sum((y - statistics.fmean(ys)) ** 2 for y in ys)
    r_squared = 1 - sum(r * r for r in residuals) / spread if spread else 0.0
    assert known[0].profile is not None
    capacity, context = known[0].profile.hardware.memory_bytes, known[0].profile.memory.cuda_context_bytes
    tokens_per_unit = _tokens(known[0]) / known[0].value
    full_at = None
    if capacity is not None and slope > 0:
        full_at = (capacity - (context or 0) - constant) / slope / tokens_per_unit
    return Line(
        constant_bytes=constant,
        per_token_bytes=slope,
        r_squared=r_squared,
        largest_residual_bytes=max(map(abs, residuals)),
        tokens_per_unit=tokens_per_unit,
        full_at=full_at,
        good=r_squared >= GOOD_FIT,
    )


def _tokens(point: Point) -> float:
    """Tokens in a micro batch, padding included."""
    recipe = point.row.cell.recipe
    assert recipe is not None
    return float(recipe.micro_batch_size * recipe.seq_len)


def _throughput(field: str, points: Sequence[Point]) -> str:
    """For example: 2x seq_len gives 1.30x throughput (1 → 2), 2x gives 1.02x (16 → 32): compute bound."""
    known = [p for p in points if p.tokens_per_s]
    if len(known) < 2:
        return ""
    steps = list(pairwise(known))
    a, b = steps[0]
    text = f"{b.value / a.value:.3g}x {field} gives {_gain(a, b)} throughput ({a.value} → {b.value})"
    if len(steps) > 1:
        a, b = steps[-1]
        text += f", {b.value / a.value:.3g}x gives {_gain(a, b)} ({a.value} → {b.value})"
    return f"{text}: {_bound(field, known)}"


def _bound(field: str, known: Sequence[Point]) -> str:
    """What bounds the last point, and from which value on; if the profiles do not say, where it goes flat."""
    bounds = [p.profile.step.bound if p.profile is not None else None for p in known]
    if all(bounds):
        first = len(bounds) - 1
        while first and bounds[first - 1] == bounds[-1]:
            first -= 1
        return f"{bounds[-1]} bound " + (f"from {field} {known[first].value}" if first else "throughout")
    powers = [
        math.log((b.tokens_per_s or 0) / (a.tokens_per_s or 1)) / math.log(b.value / a.value)
        for a, b in pairwise(known)
    ]
    first = len(powers)
    while first and powers[first - 1] < FLAT:
        first -= 1
    if first == len(powers):
        return f"still rising at {known[-1].value}"
    return f"it no longer rises from {field} {known[first].value} on"


def _memory(field: str, points: Sequence[Point], line: Line | None) -> str:
    """The line through the memory, and where memory runs out, in words."""
    parts: list[str] = []
    if line is not None and line.good:
        parts.append(
            f"Memory is {in_gib(round(line.constant_bytes))} and {in_gib(round(line.per_token_bytes))} for "
            f"each token of a micro batch (R² {_r_squared(line)})"
        )
    elif line is not None:
        parts.append(f"Memory does not follow a line (R² {_r_squared(line)})")
    elif len(known := [(p.value, in_gib(p.peak_bytes)) for p in points if p.peak_bytes]) > 1:
        (first, least), (last, most) = known[0], known[-1]
        parts.append(f"Memory is {least} at {field} {first} and {most} at {last}")
    fits, fails = _border(points)
    if fails is not None:
        before = "" if fits is None or fits > fails else f" and fits at {fits}"
        it = "it" if parts else "Memory"
        parts.append(f"{it} runs out at {field} {fails}{before}")
    elif line is not None and line.good and line.full_at is not None and parts:
        parts.append(f"by this line it is full at {field} {line.full_at:,.0f}")
    return "; ".join(parts)


def _compared(field: str, points: Sequence[Point]) -> str:
    """Memory and throughput of every value against the first one, in words."""
    first, *rest = points
    if first.profile is None or not rest:
        return ""
    parts: list[str] = []
    for point in rest:
        if point.profile is None:
            parts.append(f"{field}={spelled(point.value)} {_NOT_OK[point.row.outcome.status]}")
            continue
        gains: list[str] = []
        if first.peak_bytes and point.peak_bytes:
            more = point.peak_bytes - first.peak_bytes
            sign = "+" if more > 0 else ""
            gains.append(f"{_times(point.peak_bytes / first.peak_bytes)} memory ({sign}{in_gib(more)})")
        if first.tokens_per_s and point.tokens_per_s:
            gains.append(f"{_gain(first, point)} throughput")
        gained = f"{field}={spelled(point.value)} gives {' and '.join(gains)}"
        parts.append(f"{gained}{_of_time(first.profile, point.profile)}")
    return f"Against {field}={spelled(first.value)}: " + "; ".join(parts)


def _of_time(first: StepProfile, other: StepProfile) -> str:
    """Which kinds of kernels make up the difference of two simulated steps' times, in words; else empty."""
    here, there = first.parts_of_time_s(), other.parts_of_time_s()
    if not here or not there:
        return ""
    parts = {part: (here.get(part, 0.0), there.get(part, 0.0)) for part in {**here, **there}}
    change = change_of_time_in_words(parts)
    return f" (a step of {in_ms(first.step.time_s.median)}: {change})" if change else ""


_NOT_OK = {"out_of_memory": "runs out of memory", "refused": "is refused", "failed": "failed"}


def _gain(a: Point, b: Point) -> str:
    return _times((b.tokens_per_s or 0) / (a.tokens_per_s or 1))


def _times(factor: float) -> str:
    return f"{factor:.2f}x"


def _r_squared(line: Line) -> str:
    """R² with six digits, rounded down, so that it is never shown as 1 when it is not."""
    return f"{math.floor(line.r_squared * 1e6) / 1e6:.6g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
