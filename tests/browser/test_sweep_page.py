"""The page of a sweep and the pages of harness serve in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.file import load_recipe
from harness.serve.server import server_of
from harness.sweep import Sweep, plan_sweep, run_cells, sweep_html, sweep_of
from harness.sweep.table import ENDED
from harness.units import in_gib
from pages.ask.serving import answering

READY = "html[data-ready]"
HOSTILE = "<img src=x onerror=document.title='ran'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with a line, a border and a refusal, and two runs, one of a hostile name."""
    made = tmp_path_factory.mktemp("served")
    values = ["micro_batch_size=1,2,4,8,64", "gradient_checkpointing=true,false", "master_weights=false,true"]
    plan = plan_sweep("llama-3.1-8b-lora", values, "napkin")
    (made / "swept" / "cells").mkdir(parents=True)
    sweep = sweep_of(plan, list(run_cells(plan, made / "swept")))
    sweep.cells[1].reason = HOSTILE
    (made / "swept" / "sweep.json").write_text(sweep.to_json())
    (made / "swept.html").write_text(sweep_html(sweep))
    for name, recipe in (("one", "smoke"), (HOSTILE, "llama-3.2-1b-bf16")):
        (made / name).mkdir()
        profile = predict(load_recipe(recipe)[1], find_hardware("h100"))
        (made / name / "profile.json").write_text(profile.to_json())
    return made


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with answering(server_of(folder, 0)) as place:
        yield f"{place}runs"


def test_the_curves_are_drawn_and_the_table_has_the_numbers(folder: Path, opened: Any):
    page = opened(folder / "swept.html")
    page.wait_for_selector(READY)
    for element in page.query_selector_all(".chart"):
        element.scroll_into_view_if_needed()
    page.wait_for_function("document.querySelectorAll('.chart canvas').length >= 6")
    sweep = Sweep.read(folder / "swept" / "sweep.json")
    (drawn,) = page.evaluate(
        "[Chart.getChart(document.querySelector('#figure0-memory canvas')).data.datasets"
        ".find((one) => one.label === 'allocated').data.map((point) => point.y)]"
    )
    numbers = [cell.peak_allocated_bytes for cell in sweep.cells if cell.status == "ok"]
    assert [value * 2**30 for value in drawn] == pytest.approx(numbers[:4])
    shown = page.eval_on_selector_all(
        "[data-table=Cells] tbody tr", "rows => rows.map((row) => Number(row.cells[1].dataset.value))"
    )
    assert shown == [cell.peak_allocated_bytes or 0 for cell in sweep.cells]
    assert page.inner_text("h2:has-text('micro_batch_size') + p").startswith("2x micro_batch_size gives ")


def test_the_first_picture_is_every_cell_by_memory_and_speed(folder: Path, opened: Any):
    page = opened(folder / "swept.html")
    page.wait_for_selector("#plane canvas")
    assert page.evaluate("document.querySelector('.chart').id") == "plane"
    chart = "Chart.getChart(document.querySelector('#plane canvas'))"
    drawn = page.evaluate(
        f"{chart}.data.datasets.filter((set) => set.written)"
        ".flatMap((set) => set.data.map(({ x, y }, i) => [set.written[i], x, y]))"
    )
    sweep = Sweep.read(folder / "swept" / "sweep.json")
    known = {cell.label: cell for cell in sweep.cells if cell.status == "ok"}
    assert len(drawn) == len(known) > 3
    base = known["base"]
    for texts, x, y in drawn:
        cell = next(cell for label, cell in known.items() if label in texts)
        assert (x * 2**30, y) == (pytest.approx(cell.peak_allocated_bytes), cell.tokens_per_s)
        if cell is not base:
            more = cell.peak_allocated_bytes - base.peak_allocated_bytes
            sign = "−" if more < 0 else "+"
            said = f"{sign}{in_gib(abs(more))}, {cell.tokens_per_s / base.tokens_per_s:.2f} ×"
            assert texts[0] == f"{cell.label}  {said}"
    (front,) = page.evaluate(
        f"{chart}.data.datasets.filter((set) => set.showLine).map((set) => set.data.map(({{ x }}) => x))"
    )
    best = sweep.best_for_memory()
    assert [x * 2**30 for x in front] == pytest.approx([cell.peak_allocated_bytes for cell in best])
    lines = page.evaluate(f"{chart}.marks.lines.map((line) => line.text)")
    assert lines == [f"memory of the device: {in_gib(base.capacity_bytes)}"]
    out = [cell.label for cell in sweep.cells if cell.status == "out_of_memory"]
    assert out
    assert all(label in page.inner_text("#plane-text") for label in out)


def test_beside_it_every_cell_is_stacked_by_category(folder: Path, opened: Any):
    page = opened(folder / "swept.html")
    page.wait_for_selector("#categories canvas")
    chart = "Chart.getChart(document.querySelector('#categories canvas'))"
    cells = Sweep.read(folder / "swept" / "sweep.json").cells
    assert page.evaluate(f"{chart}.data.labels") == [cell.label for cell in cells]
    drawn = page.evaluate(f"{chart}.data.datasets.map((set) => [set.label, set.data, set.written])")
    ran = [cell.at_peak if cell.status == "ok" else None for cell in cells]
    for name, sizes, _ in drawn:
        held = [getattr(one, f"{name.replace(' ', '_')}_bytes") or 0 if one else 0 for one in ran]
        assert [size * 2**30 for size in sizes] == pytest.approx(held)
    assert {"parameters", "activations"} <= {name for name, _, _ in drawn}
    said = [
        in_gib(cell.peak_allocated_bytes) if cell.status == "ok" else ENDED[cell.status] for cell in cells
    ]
    assert drawn[-1][2] == said
    assert {"out of memory", "refused"} < set(said)


def test_the_table_sorts_and_hostile_text_stays_text(folder: Path, opened: Any):
    page = opened(folder / "swept.html")
    page.wait_for_selector(READY)
    page.click("[data-table=Cells] thead th:nth-child(2) button")
    peaks = page.eval_on_selector_all(
        "[data-table=Cells] tbody tr", "rows => rows.map((row) => Number(row.cells[1].dataset.value))"
    )
    assert peaks == sorted(peaks, reverse=True)
    assert HOSTILE in page.inner_text("[data-table=Cells]")
    assert page.title() != "ran"


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_window(folder: Path, opened: Any, width: int):
    page = opened(folder / "swept.html")
    page.set_viewport_size({"width": width, "height": 900})
    page.wait_for_selector(READY)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_served_runs_are_filtered_opened_and_compared(browser: Any, address: str):
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(address)
    page.wait_for_selector(READY)
    page.fill("#filter", "smoke nothing")
    assert page.inner_text("#count") == "0 of 3 shown"
    page.fill("#filter", "")
    assert page.is_disabled("#compare")
    for box in page.query_selector_all("#entries input"):
        box.check()
    page.click("#compare")
    page.wait_for_selector(READY)
    assert "What differs" in page.inner_text("main")
    assert HOSTILE in page.title()
    page.goto(address)
    page.click("text=swept")
    page.wait_for_selector("#figure0-memory")
    assert complaints == []
    page.close()


def test_on_paper_a_short_word_of_a_wide_table_is_whole(tmp_path: Path, opened: Any):
    values = ["micro_batch_size=1,2,4", "gradient_checkpointing=true,false"]
    plan = plan_sweep("tinyllama-lora", values, "napkin")
    (tmp_path / "cells").mkdir()
    (tmp_path / "sweep.html").write_text(sweep_html(sweep_of(plan, list(run_cells(plan, tmp_path)))))
    page = opened(tmp_path / "sweep.html")
    page.wait_for_selector(READY)
    page.set_viewport_size({"width": 480, "height": 800})  # or a larger type
    page.emulate_media(media="print")
    lines = """[...document.querySelectorAll('tbody td:last-child')]
      .filter((cell) => cell.textContent === 'compute').map((cell) => {
        const range = document.createRange();
        range.selectNodeContents(cell);
        return new Set([...range.getClientRects()].map((box) => box.top)).size;
      })"""
    assert set(page.evaluate(lines)) == {1}
    page.emulate_media(media="screen")
