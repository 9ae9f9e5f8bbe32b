"""The report in a real browser: it opens, answers hover, zoom and keys, and says what the profile says."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.report import ReportRun, read_run, write_report
from harness.step_profile import HardwareSummary, MemoryStats, StepProfile
from harness.units import in_gib
from tests.support.patience import again_until, hover
from tests.support.releases import keeps_workspaces
from tests.support.reported import HOSTILE, MIB, simulated_run, write_hand_made

Open = Callable[[Path], Any]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def ready(page: Any) -> Any:
    """The page when all its scripts ran and the first timeline, which waits to be near, is drawn."""
    page.locator("html[data-ready=true]").wait_for()
    page.locator("#run0-timeline").scroll_into_view_if_needed()
    page.locator("#run0-timeline canvas").wait_for()
    return page


def cells(table: str, column: int, what: str) -> str:
    """JavaScript: the `what` of a column's cells, in the order of the rows."""
    rows = f"[...document.querySelectorAll(\"[data-table='{table}'] tbody tr\")]"
    return f"{rows}.map((row) => row.cells[{column}].{what})"


def chart(name: str, what: str) -> str:
    """JavaScript: something of a chart as Chart.js has drawn it."""
    return f"Chart.getChart(document.querySelector('#{name} canvas')).{what}"


def plot(page: Any) -> dict[str, float]:
    """Where the timeline's axes stand in the window, in pixels."""
    box = page.locator("#run0-timeline canvas").bounding_box()
    sides = "['left', 'top', 'width', 'height']"
    left, top, width, height = page.evaluate(
        f"{sides}.map((side) => {chart('run0-timeline', 'chartArea[side]')})"
    )
    return {"x": box["x"] + left, "y": box["y"] + top, "width": width, "height": height}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReportRun:
    read = read_run(simulated_run(tmp_path_factory.mktemp("run") / "tiny"))
    read.answers = [read.profile.model_copy(update={"source": "measured"})]  # type: ignore[union-attr]
    return read


@pytest.fixture(scope="module")
def report(run: ReportRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_report([run], path)
    return path


@pytest.fixture(scope="module")
def shared(report: Path, opened: Open) -> Any:
    return ready(opened(report))


def test_paper_shows_charts_that_were_never_near_the_window(opened: Open, report: Path) -> None:
    page = opened(report)
    page.locator("html[data-ready=true]").wait_for()
    drawn = "document.querySelectorAll('#run0-roofline canvas').length"
    assert page.evaluate(drawn) == 0
    page.pdf(page_ranges="1")
    assert page.evaluate(drawn) > 0


@pytest.fixture
def page(shared: Any) -> Any:
    """The report, looked at from the beginning."""
    shared.evaluate("scrollTo(0, 0)")
    shared.click("#run0-all")
    return shared


def moment(page: Any) -> tuple[int, str]:
    """The event that the page tells about, and what it tells."""
    text = page.inner_text("#run0-there")
    found = re.match(r"After event ([\d,]+)", text)
    assert found, text
    return int(found[1].replace(",", "")), text


def view(page: Any) -> tuple[float, float]:
    axis = chart("run0-timeline", "scales.x")
    low, high = page.evaluate(f"[{axis}.min, {axis}.max]")
    return low, high


def test_every_chart_is_drawn_and_said_in_words(page: Any) -> None:
    charts = page.locator(".chart")
    assert charts.count() == 8
    for i in range(charts.count()):
        charts.nth(i).scroll_into_view_if_needed()
        charts.nth(i).locator("canvas, .boxes, .segment").first.wait_for()
        words = page.locator(f"#{charts.nth(i).get_attribute('aria-describedby')}")
        assert len(words.inner_text()) > 30


def test_numbers_are_those_of_the_profile(page: Any, run: ReportRun) -> None:
    profile = run.profile
    assert profile is not None
    names = page.locator(".tile dt").all_inner_texts()
    shown = dict(zip(names, page.locator(".tile dd:nth-of-type(1)").all_inner_texts(), strict=True))
    assert shown["Peak allocated"] == in_gib(profile.memory.peak_allocated_bytes)
    assert shown["Peak reserved"] == in_gib(profile.memory.peak_reserved_bytes)
    assert shown["Tokens per second"] == f"{profile.step.tokens_per_s:,.0f}"
    table = "One step by phase"
    phases = page.evaluate(cells(table, 0, "dataset.value"))
    medians, allocated, reserved = (page.evaluate(cells(table, i, "dataset.value")) for i in (1, 5, 6))
    assert set(phases) == set(profile.phases)
    for i, name in enumerate(phases):
        stats = profile.phases[name]
        assert float(medians[i]) == stats.time_s.median
        assert int(allocated[i]) == stats.peak_allocated_bytes
        assert int(reserved[i]) == stats.peak_reserved_bytes
    table = "Memory at the peak by category"
    categories, sizes = (page.evaluate(cells(table, i, "dataset.value")) for i in (0, 1))
    stated = {name.removesuffix("_bytes"): size for name, size in profile.memory.at_peak.model_dump().items()}
    assert dict(zip(categories, map(int, sizes), strict=True)) == stated


def test_the_timeline_s_peak_is_the_profile_s(page: Any, run: ReportRun) -> None:
    """Unpacked and summed up by the page itself."""
    assert run.profile is not None
    assert run.history is not None
    stated = run.profile.memory.peak_allocated_bytes
    peak = page.evaluate(chart("run0-timeline", "data.datasets.find((one) => one.label === 'peak').data[0]"))
    unit = UNITS[page.evaluate(chart("run0-timeline", "scales.y.options.title.text"))]
    assert (peak["x"], peak["y"] * unit) == (run.history.peak()[0], stated)
    page.click("#run0-peak")
    assert f"{in_gib(stated)} allocated" in moment(page)[1]


def test_sizes_are_written_as_in_the_terminal(page: Any) -> None:
    sizes = [
        0,
        1,
        511,
        1000,
        104_857,
        104_858,
        17_039_360,  # 16.25 MiB, a tie
        2**20,
        107_374_182,
        107_374_183,
        3 * 2**30 + 12_345,
        -5 * 2**20,
    ]
    assert page.evaluate("(sizes) => sizes.map(harness.bytes)", sizes) == [in_gib(size) for size in sizes]


def test_hover_tells_bytes_and_stack_of_the_moment(page: Any, run: ReportRun) -> None:
    history = run.history
    assert history is not None
    box = plot(page)
    low, high = view(page)
    for share in (0.2, 0.45, 0.8):
        there = low + share * (high - low)
        x, y = box["x"] + share * box["width"], box["y"] + box["height"] / 2
        hover(page, x, y, lambda there=there: abs(moment(page)[0] - there) < 0.01 * (high - low) + 1)
        event, text = moment(page)
        sizes = dict(zip(history.groups, history.by_group()[:, event].tolist(), strict=True))
        for name, size in sizes.items():
            assert (f"{name} {in_gib(size)}" in text) == (size > 0)
        stack = "\n".join(history.tree.stack(int(history.stack[event])))
        assert page.inner_text("#run0-there .stack") == (stack or "(no stack was recorded)")
        change = int(history.change_bytes[event])
        assert f"It {'allocates' if change > 0 else 'frees'} {in_gib(abs(change))} of" in text


def test_zoom_by_mouse_and_back(page: Any) -> None:
    whole = view(page)
    box = plot(page)
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], y, steps=5)
    page.mouse.up()
    again_until(page, lambda: view(page) != whole)
    low, high = view(page)
    assert high - low == pytest.approx((whole[1] - whole[0]) / 10, rel=0.2)
    drawn = page.evaluate(chart("run0-timeline", "data.datasets.at(-1).data.map((point) => point.x)"))
    assert all(low - 2 <= event <= high + 2 for event in drawn)  # what cannot be seen is not drawn
    middle = box["x"] + box["width"] / 2
    again_until(page, lambda: view(page) == whole, lambda attempt: page.mouse.dblclick(middle, y))


def test_keys_reach_everything(page: Any, run: ReportRun) -> None:
    assert run.history is not None
    page.evaluate("() => { document.body.tabIndex = -1; document.body.focus(); }")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    whole = view(page)
    page.focus("#run0-in")
    page.keyboard.press("Enter")
    assert view(page)[1] - view(page)[0] < (whole[1] - whole[0]) / 2
    page.focus("#run0-moment")
    before, _ = moment(page)
    page.keyboard.press("ArrowLeft")
    after, _ = moment(page)
    assert after == before - 1
    total = int(run.history.allocated_bytes()[after])
    assert in_gib(total) in page.get_attribute("#run0-moment", "aria-valuetext")
    out_of_reach = (
        "[...document.querySelectorAll('button, summary, .scroll, input')].filter((e) => e.tabIndex < 0)"
    )
    assert page.evaluate(f"{out_of_reach}.length") == 0


def test_no_peak_is_lost_at_any_zoom(page: Any, run: ReportRun) -> None:
    """Whatever stretch of events is asked for in however few points: near each event is one as high."""
    assert run.history is not None
    total = run.history.allocated_bytes().tolist()
    unpacked = "histories.read(harness.data.runs[0].history)"
    script = f"async (asked) => Array.from(histories.highest(await {unpacked}, ...asked))"
    last = len(total) - 1
    for start, end, count in ((0, last, 37), (last // 3, last // 2, 50), (10, 20, 400), (5, 5, 3)):
        picked = page.evaluate(script, [start, end, count])
        pixel = -(-(end - start + 1) // count)
        assert picked == sorted(set(picked))
        assert len(picked) <= count
        assert max(total[i] for i in picked) == max(total[start : end + 1])
        for i in range(start, end + 1):
            assert any(total[j] >= total[i] for j in picked if abs(i - j) <= pixel)


def test_tables_sort_by_value(page: Any) -> None:
    header = page.locator("[data-table='allocations'] thead th").nth(1)
    counts = f"{cells('allocations', 1, 'dataset.value')}.map(Number)"
    before = page.evaluate(counts)
    assert len(set(before)) > 2
    assert header.get_attribute("aria-sort") is None
    header.locator("button").click()
    assert page.evaluate(counts) == sorted(before, reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    header.locator("button").focus()
    page.keyboard.press("Enter")
    assert page.evaluate(counts) == sorted(before)
    assert header.get_attribute("aria-sort") == "ascending"
    page.locator("[data-table='One step by phase'] thead button").first.click()
    names = page.evaluate(cells("One step by phase", 0, "textContent"))
    assert names == ["backward", "data", "forward", "optimizer_step"]


def test_toggles_of_the_vertical_axis(page: Any, run: ReportRun) -> None:
    assert run.history is not None
    assert run.profile is not None

    def bounds() -> list[float]:
        unit = UNITS[page.evaluate(chart("run0-timeline", "scales.y.options.title.text"))]
        axis = chart("run0-timeline", "scales.y")
        return [end * unit for end in page.evaluate(f"[{axis}.min, {axis}.max]")]

    if page.get_attribute("#run0-floor", "aria-pressed") == "false":
        page.click("#run0-floor")
    assert page.get_attribute("#run0-floor", "aria-pressed") == "true"
    # what each group never falls below, and a strip for it
    by_group = np.concatenate([run.history.baseline_bytes[:, None], run.history.by_group()], axis=1)
    lowest, highest = by_group.min(axis=1), run.history.reserved_bytes.max()
    assert lowest.sum() - 0.12 * (highest - lowest.sum()) <= bounds()[0] <= lowest.sum()
    strip = page.evaluate(chart("run0-timeline", "marks.strip.texts[0]"))
    for name, size in zip(run.history.groups, lowest.tolist(), strict=True):
        assert (f"{name} {in_gib(size)}" in strip) == (size > 0)
    page.click("#run0-floor")
    assert bounds()[0] == 0
    page.click("#run0-capacity")
    assert bounds()[1] > (run.profile.hardware.memory_bytes or 0)
    page.click("#run0-capacity")
    assert bounds()[1] < 2 * run.history.reserved_bytes.max()
    page.click("#run0-floor")


def test_estimated_times_are_on_the_axis_when_wanted(page: Any, run: ReportRun) -> None:
    assert run.profile is not None
    assert run.history is not None
    phases = run.profile.phases
    backward = next(one for one in run.history.phases if one.phase == "backward")
    before = sum(phases[name].time_s.median or 0 for name in ("data", "forward"))
    page.click("#run0-time")
    assert page.evaluate(chart("run0-timeline", "scales.x.options.title.text")).startswith("ms, estimated")
    bands = page.evaluate(chart("run0-timeline", "marks.bands"))
    (band,) = [band for band in bands if band["text"] == "backward"]
    assert band["from"] == pytest.approx(before * 1e3, rel=0.01, abs=0.01)
    took = phases["backward"].time_s.median or 0
    assert band["to"] - band["from"] == pytest.approx(took * 1e3, rel=0.01, abs=0.01)
    page.click("#run0-time")
    assert page.evaluate(chart("run0-timeline", "scales.x.max")) == run.history.events
    bands = page.evaluate(chart("run0-timeline", "marks.bands"))
    assert [backward.start, backward.end] in [[band["from"], band["to"]] for band in bands]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_paper_cuts_nothing_off(page: Any, theme: str) -> None:
    page.set_viewport_size({"width": 718, "height": 1000})
    page.emulate_media(color_scheme=theme, media="print")
    wider = "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
    assert page.evaluate(wider) == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 718
    heads = (
        "[...new Set([...document.querySelectorAll('thead')].map((e) => getComputedStyle(e).breakInside))]"
    )
    assert set(page.evaluate(heads)) == {"avoid"}  # what Chromium asks of a head that it prints again
    # and there is no button in it, with which it would not
    buttons = "[...document.querySelectorAll('thead button')].map((e) => getComputedStyle(e).display)"
    assert set(page.evaluate(buttons)) == {"contents"}
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1600, "height": 900})


def test_long_paths_are_broken_between_their_parts(page: Any) -> None:
    """Where the browser begins a new line, in a cell on paper and in what is there on a phone."""
    breaks = """(selector) => [...document.querySelectorAll(selector)].flatMap((cell) => {
      const found = [], walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
      let before = null;
      for (let node = walk.nextNode(); node; node = walk.nextNode())
        for (let at = 0; at < node.length; at++) {
          const range = document.createRange();
          range.setStart(node, at);
          range.setEnd(node, at + 1);
          const [box] = range.getClientRects();
          if (!box?.width) { // a space, with which a line ends
            if (before) before.text = node.data[at];
            continue;
          }
          if (before && box.top > before.bottom - 2) found.push(before.text + node.data[at]);
          before = { bottom: box.bottom, text: node.data[at] };
        }
      return found;
    })"""
    page.click("#run0-peak")
    for media, width, selector in (
        ("print", 560, "td.place:not(:has(details))"),
        ("screen", 390, ".moment summary"),
    ):
        page.emulate_media(media=media)
        page.set_viewport_size({"width": width, "height": 900})
        found = page.evaluate(breaks, selector)
        assert found
        within = [pair for pair in found if pair[0] not in " ./-,(" and pair[1] not in " ("]
        assert (media, within) == (media, [])
    page.emulate_media(media="screen")
    page.set_viewport_size({"width": 1600, "height": 900})


@keeps_workspaces
def test_what_is_there_at_the_moment_stands_beside_the_timeline(page: Any, run: ReportRun) -> None:
    assert run.history is not None
    page.click("#run0-peak")
    page.click("#run0-all")
    event, _ = run.history.peak()
    held = dict(zip(run.history.groups, run.history.by_group()[:, event].tolist(), strict=True))
    column = page.locator("#run0-timeline ~ .column button")
    said = column.evaluate_all("pieces => pieces.map((piece) => piece.title)")
    assert said
    for words in said:
        name = next(name for name in held if words.startswith(f"{name} "))
        assert words == f"{name} {in_gib(held[name])}"
    name = said[-1].rsplit(" ", 2)[0]
    column.last.click()
    assert f" of {name}" in page.inner_text("#run0-live p")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_both_themes_at_both_widths(page: Any, width: int, theme: str, tmp_path: Path) -> None:
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}
    ground = "getComputedStyle(document.body).backgroundColor"
    other = {"light": "dark", "dark": "light"}[theme]
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)
    page.evaluate("() => { delete document.documentElement.dataset.theme; }")
    assert page.evaluate(ground) == grounds[theme]
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # nothing sticks out
    for place in (".moment summary", ".moment p"):
        page.evaluate(f"document.querySelector('{place}').textContent = 'base_model.'.repeat(40)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.wait_for_timeout(400)
    assert page.locator("#run0-timeline canvas").bounding_box()["width"] <= width
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    page.click("#theme")
    assert page.evaluate(ground) == grounds[other]
    # the charts follow
    assert page.evaluate(chart("run0-timeline", "options.color")) == page.evaluate(
        "getComputedStyle(document.body).color"
    )


def test_hostile_names_stay_text(opened: Open, tmp_path: Path) -> None:
    run, again = read_run(write_hand_made(tmp_path, HOSTILE)), read_run(write_hand_made(tmp_path / "b"))
    assert run.history is not None
    run.name = HOSTILE
    run.history.groups = (HOSTILE, *run.history.groups[1:])
    run.profile = StepProfile(
        source="measured",
        recipe={"model": HOSTILE},
        hardware=HardwareSummary(name=HOSTILE, kind="cuda", memory_bytes=16 * MIB),
        memory=MemoryStats(kind="cuda_allocator", at_peak_by_module={HOSTILE: 9, "b": 3}),
    )
    write_report([run, again], tmp_path / "report.html")
    page = ready(opened(tmp_path / "report.html"))
    for name in ("#overlay", "#run0-modules", "#run0-code"):
        page.locator(name).scroll_into_view_if_needed()
        page.locator(f"{name} canvas, {name} .boxes").first.wait_for()
    page.locator("#run0-timeline").scroll_into_view_if_needed()
    box = plot(page)
    hover(
        page,
        box["x"] + box["width"] / 2,
        box["y"] + box["height"] / 2,
        lambda: HOSTILE in page.inner_text("#run0-there .stack"),
    )
    assert HOSTILE in page.inner_text("h1")
    assert HOSTILE in page.inner_text("#run0-code .boxes")
    assert HOSTILE in page.inner_text("#overlay + .legend")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_several_runs_lie_over_each_other(opened: Open, run: ReportRun, tmp_path: Path) -> None:
    other = read_run(simulated_run(tmp_path / "longer", seq_len=32))
    write_report([run, other], tmp_path / "report.html")
    page = ready(opened(tmp_path / "report.html"))
    page.locator("#overlay canvas").wait_for()
    lines = page.evaluate(
        chart(
            "overlay",
            "data.datasets.map((run) => [run.label, Math.max(...run.data.map((point) => point.y))])",
        )
    )
    unit = UNITS[page.evaluate(chart("overlay", "scales.y.options.title.text"))]
    assert [name for name, _ in lines] == ["tiny", "longer"]
    for (_, most), one in zip(lines, (run, other), strict=True):
        assert one.history is not None
        assert most * unit == one.history.peak()[1]
    assert "each phase at one width" in page.evaluate(chart("overlay", "scales.x.options.title.text"))


def test_the_roofline_s_ticks_are_whole_numbers_of_what_they_stand_for(page: Any) -> None:
    page.locator("#run0-roofline").scroll_into_view_if_needed()
    page.locator("#run0-roofline canvas").wait_for()
    for axis in ("x", "y"):
        ticks = page.evaluate(
            chart("run0-roofline", f"scales.{axis}.ticks.map((tick) => [tick.label, tick.value])")
        )
        assert len(ticks) >= 2
        assert all(float(text.replace(",", "")) == pytest.approx(value) for text, value in ticks)
        assert {text.strip("0.,")[0] for text, _ in ticks} <= {"1", "2", "5"}


def test_the_legend_hides_a_group_and_what_lies_on_it_sinks(page: Any, run: ReportRun) -> None:
    assert run.history is not None

    def heights() -> dict[str, float]:
        highest = "data.datasets.map((one) => [one.label, Math.max(...one.data.map((point) => point.y))])"
        return dict(page.evaluate(chart("run0-timeline", highest)))

    before = heights()
    button = page.locator("#run0-timeline + .legend button", has_text="parameters")
    button.focus()
    page.keyboard.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert page.evaluate(
        chart("run0-timeline", "data.datasets.filter((one) => one.hidden).map((one) => one.label)")
    ) == ["parameters"]
    assert heights()["optimizer_state"] < before["optimizer_state"]
    button.click()
    assert heights() == before


def test_a_box_of_the_peak_is_enlarged_and_the_path_leads_back(page: Any) -> None:
    boxes = page.locator("#run0-modules .box")
    before = boxes.count()
    inner = page.locator("#run0-modules button.box").nth(1)
    name = inner.locator("span").first.inner_text()
    inner.click()
    assert boxes.first.locator("span").first.inner_text() == name
    assert boxes.first.bounding_box()["width"] == pytest.approx(
        page.locator("#run0-modules").bounding_box()["width"], abs=1
    )
    page.locator("#run0-modules .path button").first.click()
    assert boxes.count() == before
