"""The charts of a report as PNG pictures for slides, drawn by matplotlib. Imports no torch."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import InputError, needed
from harness.report.answers import answers_about
from harness.report.history import History
from harness.report.phase_roofline import PhaseRoofline, roofline_of
from harness.report.run import ReportRun
from harness.step_profile import KERNELS, PHASES, SMALL_SHARE, StepProfile
from harness.units import in_gib, in_ms

COLOURS = (
    *("#0072B2", "#E69F00", "#CC79A7", "#D55E00", "#56B4E9", "#009E73", "#999999", "#F0E442"),
    "#882255",
)
"""The colours of a chart's parts: Okabe and Ito's palette and one more, as in assets/page.js."""
PATTERNS = ("", "//", "xx", "\\\\", "", "..", "--", "++", "oo")
"""A pattern for each colour, as matplotlib's hatches, so that the parts differ without colours too."""
WIDTH_POINTS = 2000
"""The most points of a timeline from left to right."""


def drawing() -> Any:
    """The class Figure of matplotlib. Raises MissingDependency where it is not installed."""
    with needed("matplotlib", None, "a picture"):
        from matplotlib.figure import Figure
    return Figure


def write_figures(runs: Sequence[ReportRun], folder: Path) -> list[Path]:
    """Draw every chart that a run has data for into `folder`/<run>-<chart>.png. Returns the files.

    Raises InputError when nothing can be drawn or the folder cannot be made, MissingDependency without
    matplotlib.
    """
    figure_class, figures = drawing(), dict[str, Any]()
    for run in runs:
        for chart, draw in _charts(run).items():
            figure = figure_class(figsize=(12, 6.75), dpi=160, layout="constrained")
            draw(figure.subplots())
            figures[_free_name(f"{run.name}-{chart}", figures)] = figure
    if not figures:
        raise InputError("there is nothing to draw: no run has a timeline, phases or answers to compare.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / name)
    except OSError as error:
        raise InputError(f"cannot write pictures to {folder}: {error.strerror or error}.") from None
    return [folder / name for name in figures]


def _free_name(name: str, taken: Any) -> str:
    """A file name for a picture called `name` that is not among those `taken`."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")
    number = 1
    while (found := f"{plain}{'' if number == 1 else f'-{number}'}.png") in taken:
        number += 1
    return found


def _charts(run: ReportRun) -> dict[str, Callable[[Any], None]]:
    """The charts that can be drawn of a run: by name, a function that draws into matplotlib's axes."""
    charts: dict[str, Callable[[Any], None]] = {}
    profile, history = run.profile, run.history
    if history is not None and history.events:
        capacity = profile.hardware.memory_bytes if profile else None
        charts["timeline"] = lambda axes: draw_timeline(axes, run.title, history, capacity)
    if profile is None:
        return charts
    if any(stats.time_s.median is not None for stats in profile.phases.values()):
        charts["phases"] = lambda axes: draw_phases(axes, run.title, profile)
    answers = answers_about(run)
    if answers is not None and not isinstance(answers, str):
        charts["answers"] = lambda axes: draw_answers(axes, run.title, answers.bars, answers.reference)
    roofline = roofline_of(profile, run.answers)
    if not isinstance(roofline, str):
        charts["roofline"] = lambda axes: draw_roofline(axes, run.title, roofline)
    return charts


def draw_timeline(axes: Any, name: str, history: History, capacity_bytes: int | None) -> None:
    """Draw the timeline, stacked by group, and the peak. Where there are more events than WIDTH_POINTS, each
    point is the highest of several."""
    allocated = history.allocated_bytes()
    picked = highest(allocated, WIDTH_POINTS)
    event, peak = history.peak()
    unit, scale = _unit(peak)
    series = history.by_group()[:, picked] / scale
    shown = [i for i in range(len(history.groups)) if series[i].any()]
    areas = axes.stackplot(
        picked,
        series[shown],
        labels=[_plain(history.groups[i]) for i in shown],
        colors=[COLOURS[i % len(COLOURS)] for i in shown],
        step="post",
    )
    for area, i in zip(areas, shown, strict=True):
        area.set_hatch(PATTERNS[i % len(PATTERNS)])
        area.set_edgecolor("white")
        area.set_linewidth(0)
    for i, run in enumerate(history.phases):
        if run.phase is None or (run.end - run.start) * 200 < history.events:
            continue
        axes.axvspan(run.start, run.end, color="black", alpha=0.1 if i % 2 else 0.03, linewidth=0, zorder=0)
        if (run.end - run.start) * 15 > history.events:
            middle = (run.start + run.end) / 2
            axes.text(
                middle, 1, _plain(run.phase), transform=axes.get_xaxis_transform(), ha="center", va="bottom"
            )
    axes.plot([max(event, 0)], [peak / scale], "kD", label=f"peak {in_gib(peak)}")
    if capacity_bytes is not None and capacity_bytes < 2 * peak:
        axes.axhline(
            capacity_bytes / scale, color="black", linestyle="--", label=f"capacity {in_gib(capacity_bytes)}"
        )
    axes.set(xlim=(0, history.events), ylim=(0, None), xlabel="allocations and frees, in order", ylabel=unit)
    axes.set_title(f"{_plain(name)}: memory over time", pad=24, loc="left")
    axes.figure.legend(loc="outside lower left", ncols=4, frameon=False)


def draw_phases(axes: Any, name: str, profile: StepProfile) -> None:
    """Draw the median time of each phase, by kind of kernel where that is known, with its 10th and 90th
    percentile."""
    timed = [(phase, profile.phases[phase].time_s) for phase in PHASES if phase in profile.phases]
    known = [(phase, time, time.median) for phase, time in timed if time.median is not None]
    medians = np.array([median for _, _, median in known])
    spread = np.array(
        [(time.p10 if time.p10 is not None else median, time.p90 or median) for _, time, median in known]
    )
    errors = np.abs(spread.T - medians) * 1e3
    labels = [f"{phase}\n{in_ms(median)}" for phase, _, median in known]
    totals = profile.kernels_s()
    parts = {
        KERNELS.get(kernel, kernel): np.array(
            [profile.phases[phase].kernels_s.get(kernel, 0.0) for phase, _, _ in known]
        )
        for kernel, seconds in totals.items()
        if seconds >= SMALL_SHARE * sum(totals.values())
    }
    rest = medians - sum(parts.values(), np.zeros(len(known)))
    parts["other kernels, and waiting" if parts else ""] = rest.clip(0)
    stacked(axes, labels, {part: seconds * 1e3 for part, seconds in parts.items()}, edgecolor="white")
    if errors.any():
        axes.errorbar(medians * 1e3, labels, xerr=errors, fmt="none", ecolor="black", capsize=4)
    axes.invert_yaxis()
    axes.set(xlabel="ms", xlim=(0, None))
    if len(parts) > 1:
        axes.figure.legend(loc="outside lower left", ncols=5, frameon=False)
    axes.set_title(
        f"{_plain(name)}: time of a step by phase, {profile.source} on {_plain(profile.hardware.name)}",
        loc="left",
    )


def draw_answers(axes: Any, name: str, bars: dict[str, Any], reference: str) -> None:
    """Draw the bytes at the peak by category for each answer, and those that are unexplained. `bars` is as
    Answers has it."""
    sources = bars["rows"]
    known = {part: [size or 0 for size in sizes] for part, sizes in bars["parts"].items()}
    unit, scale = _unit(max(sum(sizes[i] for sizes in known.values()) for i in range(len(sources))))
    stacked(
        axes, sources, {part: np.array(sizes) / scale for part, sizes in known.items()}, edgecolor="white"
    )
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel=f"{unit}; unexplained is {reference} minus the answer")
    axes.set_title(f"{_plain(name)}: memory at the peak", loc="left")
    axes.figure.legend(loc="outside lower left", ncols=4, frameon=False)


def stacked(axes: Any, bars: Sequence[Any], parts: dict[str, Any], **look: Any) -> Any:
    """Draw horizontal bars whose parts follow one another, with this look; a part below zero extends to the
    left of zero. Returns where the bars end."""
    left = np.zeros(len(bars))
    for i, (part, widths) in enumerate(parts.items()):
        if widths.any():
            axes.barh(
                bars,
                widths,
                left=np.where(widths < 0, 0, left),
                color=COLOURS[i % len(COLOURS)],
                hatch=PATTERNS[i % len(PATTERNS)],
                label=part or None,
                **look,
            )
        left = left + widths
    return left


def draw_roofline(axes: Any, name: str, roofline: PhaseRoofline) -> None:
    """Draw the device's two ceilings, and the phases under them."""
    points = [point for point in roofline.points if point.flops]
    ridge = roofline.peak_flops / roofline.memory_bandwidth
    intensities = [ridge, *(point.intensity for point in points)]
    x = np.array([min(intensities) / 4, ridge, max(intensities) * 4])
    axes.loglog(x, [roofline.ceiling(value) / 1e12 for value in x], "k-", label=_plain(roofline.device))
    for i, point in enumerate(points):
        marker = "osD^"[i % 4]
        axes.loglog(
            [point.intensity],
            [point.flops_per_s / 1e12],
            marker,
            color=COLOURS[(5, 3, 0, 1)[i % 4]],
            markersize=12,
            label=point.phase,
        )
    axes.set(xlabel="FLOPs per byte moved", ylabel="TFLOP/s")
    axes.set_title(f"{_plain(name)}: roofline", loc="left")
    axes.grid(which="both", alpha=0.3)
    axes.legend()


def highest(values: np.ndarray[Any, Any], count: int) -> np.ndarray[Any, Any]:
    """The index of the largest value in each of at most `count` equal stretches, so that no peak is lost."""
    if len(values) <= count:
        return np.arange(len(values))
    edges = np.arange(count + 1) * len(values) // count
    return np.array([start + values[start:end].argmax() for start, end in pairwise(edges.tolist())])


def _unit(size_bytes: float) -> tuple[str, int]:
    """The unit for sizes up to this one: its name, and its bytes."""
    if size_bytes < 2**30 / 10:
        return "MiB", 2**20
    return "GiB", 2**30


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: between dollar signs it would read mathematics."""
    return text.replace("$", r"\$")
