"""The page of somebody's snapshot in a browser: out of memory, time on the axis, a click on an allocation."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.report import ReportRun, read_run, write_report
from harness.units import in_gib
from tests.browser.test_report_page import plot
from tests.snapshot.test_versions import written_by
from tests.support.patience import again_until
from tests.support.reported import MIB, write_hand_made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReportRun:
    path = tmp_path_factory.mktemp("page") / "oom.pickle"
    path.write_bytes(pickle.dumps(written_by("2.13")))
    return read_run(path)


@pytest.fixture(scope="module")
def page(run: ReportRun, opened: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([run], path)
    return shown(opened(path))


def shown(page: Any) -> Any:
    """The page when its timeline is drawn."""
    page.locator("html[data-ready=true]").wait_for()
    page.locator("#run0-timeline").scroll_into_view_if_needed()
    page.locator("#run0-timeline canvas").wait_for()
    return page


CHART = "Chart.getChart(document.querySelector('#run0-timeline canvas'))"


def axis(page: Any) -> dict[str, Any]:
    return page.evaluate(
        f"(() => {{ const {{ x }} = {CHART}.scales;"
        " return { title: x.options.title.text, range: [x.min, x.max] }; })()"
    )


def test_it_begins_with_the_out_of_memory(page: Any) -> None:
    assert page.inner_text(".answer").startswith("Memory ran out: 3.0 MiB were asked for")
    assert "net.py:7 forward" in page.inner_text("details[open] .stack")
    assert "Out of memory" not in page.inner_text("h1")
    lines = page.evaluate(f"{CHART}.marks.lines")
    assert "out of memory" in [line.get("text") for line in lines]


def test_time_is_on_the_axis_until_it_is_not_wanted(page: Any, run: ReportRun) -> None:
    assert run.history is not None
    assert run.history.time_us is not None
    last = int(run.history.time_us[-1]) / 1000
    assert axis(page)["title"] == "ms since the first event"
    low, high = axis(page)["range"]
    assert (low, high) == (0, pytest.approx(last, rel=1e-3))
    drawn = page.evaluate(f"{CHART}.data.datasets.at(-1).data.map((point) => point.x)")
    assert len(set(drawn)) >= run.history.events  # in order, also where several fall in one microsecond
    assert drawn == sorted(drawn)
    page.click("#run0-time")
    assert axis(page) == {"title": "allocations and frees, in order", "range": [-1, run.history.events]}
    page.click("#run0-time")


def test_a_click_lists_the_allocations_of_its_area(opened: Callable[[Path], Any], tmp_path: Path) -> None:
    run = read_run(write_hand_made(tmp_path / "x"))
    write_report([run], tmp_path / "report.html")
    page = shown(opened(tmp_path / "report.html"))
    history, event = run.history, 5
    assert history is not None
    box = plot(page)
    (left, right), title = axis(page)["range"], axis(page)["title"]
    bottom, top = page.evaluate(f"(({{ min, max }}) => [min, max])({CHART}.scales.y)")
    assert (title, bottom) == ("allocations and frees, in order", 0)
    x = box["x"] + box["width"] * (event + 0.2 - left) / (right - left)
    under = 0
    for group, size in enumerate(history.by_group()[:, event].tolist()):
        if size:
            y = box["y"] + box["height"] * (1 - (under + size / 2) / MIB / top)
            under += size
            name = history.groups[group]
            said = page.get_by_text(f"1 allocation of {name} is there at this moment:")
            again_until(
                page,
                lambda said=said: said.count() > 0,
                lambda attempt, x=x, y=y: page.mouse.click(x + attempt % 2, y),
            )
            assert f"{in_gib(size)} of {name}, " in page.inner_text("#run0-live")
    page.click("#run0-there-now")
    assert page.inner_text("#run0-live").startswith("5 allocations are there at this moment")
    page.get_by_text("6.0 MiB of activations").click()
    opened_one = page.locator("#run0-live details[open]")
    assert "/x/activations.py:7 train_step" in opened_one.locator(".stack").inner_text()
    assert opened_one.locator("p").inner_text() == "There from event 1 to event 6."


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_sticks_out(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_timeout(400)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
