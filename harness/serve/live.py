"""The page of a run that has no profile yet: its loss and its memory so far, drawn without scripts."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.report import render_page
from harness.serve.index import Entry
from harness.serve.log import Log, read_log
from harness.units import in_gib, in_ms

REFRESH_S = 5
"""How often, in seconds, the page of a running run loads itself again."""
MOST_ROWS = 20
"""The last steps that the page lists."""
WIDTH, HEIGHT = 720, 160
"""The size of a drawing in SVG units, as live.html states it; the page scales it."""


@dataclass(frozen=True)
class Drawing:
    """A line over the steps, with the ends of its axes as text."""

    title: str
    points: str
    """The points of an SVG polyline."""
    lowest: str
    """The least value, at the bottom of the drawing."""
    highest: str
    first_step: int
    """Counted from 1, as the last one is."""
    last_step: int


def live_page(entry: Entry) -> str:
    """The page of a run at work (it loads itself again), or of one that ended without a profile.

    Raises InputError when its files cannot be read.
    """
    log = read_log(entry.path)
    return render_page(
        "live.html",
        title=entry.name,
        data={},
        charts=False,
        home="/runs",
        refresh_s=REFRESH_S if entry.kind == "running" else None,
        running=entry.kind == "running",
        log=log,
        drawings=_drawings(log),
        rows=list(reversed(log.steps[-MOST_ROWS:])),
        changed=entry.changed,
        in_gib=in_gib,
        in_ms=in_ms,
    )


def _drawings(log: Log) -> list[Drawing]:
    """The loss and the peak of memory over the steps. What never changes is not drawn: a tile has it."""
    losses = [(step.step, step.loss) for step in log.steps if step.loss is not None]
    peaks = [(step.step, float(step.peak_bytes)) for step in log.steps if step.peak_bytes is not None]
    drawings: list[Drawing] = []
    for title, values in (("Loss", losses), ("Peak memory so far", peaks)):
        if len({value for _, value in values}) > 1:
            lowest, highest = (pick(value for _, value in values) for pick in (min, max))
            low, high = (
                f"{value:.4f}" if title == "Loss" else in_gib(int(value)) for value in (lowest, highest)
            )
            points = _points(values, lowest, highest)
            drawings.append(Drawing(title, points, low, high, values[0][0] + 1, values[-1][0] + 1))
    return drawings


def _points(values: Sequence[tuple[int, float]], lowest: float, highest: float) -> str:
    """The polyline of (step, value) pairs, whose range fills the drawing."""
    first, last = values[0][0], values[-1][0]
    steps, span = max(last - first, 1), (highest - lowest) or 1.0
    return " ".join(
        f"{(step - first) / steps * WIDTH:.1f},{HEIGHT - (value - lowest) / span * HEIGHT:.1f}"
        for step, value in values
    )
