"""`harness report` as a user meets it: the page, Markdown, CSV, pictures, and what it refuses."""

import csv
import io
import json
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.report import Cell, ReportRun, Table, read_run, render_page, to_csv, to_markdown, write_report
from harness.report.at_peak import kinds
from harness.report.differences import difference_tables
from harness.report.page import script_json
from harness.report.phase_roofline import PhaseRoofline, roofline_of
from harness.snapshot import read_snapshot, snapshot_to_json
from harness.step_profile import (
    HardwareSummary,
    MemoryStats,
    OutOfMemoryReport,
    PhaseStats,
    StepProfile,
    TimeStats,
)
from tests.support.commands import Call
from tests.support.reported import HOSTILE, MIB, measured_run, simulated_run, write_hand_made

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """A page as a browser's parser sees it: elements with their attributes, text, scripts."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._inside != "style":
            self.text += data

    @property
    def data(self) -> Any:
        return next(json.loads(text) for attributes, text in self.scripts if attributes.get("id") == "data")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        "measured": measured_run(folder / "measured"),
        "simulated": simulated_run(folder / "simulated"),
        "longer": simulated_run(folder / "longer", seq_len=32),
    }


@pytest.fixture
def call(call: Call) -> Call:
    return partial(call, "report")


def test_the_page_lies_beside_the_run(call: Call, runs: dict[str, Path]) -> None:
    status, out, err = call(runs["measured"])
    assert (status, out) == (0, "")
    page = runs["measured"] / "report.html"
    assert str(page) in err
    parsed = Page(page.read_text(encoding="utf-8"))
    assert (
        parsed.data["runs"][0]["history"]["peak"]["bytes"]
        == read_run(runs["measured"]).profile.memory.peak_allocated_bytes
    )  # type: ignore[union-attr]
    for heading in (
        "Memory over time",
        "What is allocated at the peak",
        "Phases of a step",
        "Recipe and provenance",
    ):
        assert heading in parsed.text
    assert "napkin" in parsed.text
    assert "there is no datasheet of" in parsed.text  # no roofline on a CPU, and it says so


def test_what_has_no_stack_has_its_module(runs: dict[str, Path]) -> None:
    """A simulation knows whose each parameter and each optimizer state is, and its snapshot says so."""
    history = read_run(runs["simulated"]).history
    assert history is not None
    live = {id(span) for span in history.live_at(history.peak()[0])}
    named = {"parameters": 0, "optimizer_state": 0}
    for span, group in zip(history.spans, history.group_of_span.tolist(), strict=True):
        if id(span) in live and history.groups[group] in named and span.size_bytes > 512:
            assert span.module, span
            named[history.groups[group]] += 1
    assert min(named.values()) > 5
    found = kinds(history, None)
    modules = {kind.module for kind in found if kind.group == "parameters"}
    assert "model.layers.*.mlp.gate_proj" in modules
    assert None not in modules


def test_a_page_weighs_little_beside_its_data(runs: dict[str, Path], tmp_path: Path) -> None:
    write_report([read_run(runs["simulated"])], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    data = next(text for attributes, text in Page(page).scripts if attributes.get("id") == "data")
    data += "".join(re.findall(r"<tbody>.*?</tbody>", page, re.DOTALL))
    assert len(data) > 20_000
    assert len(page.encode()) - len(data.encode()) < 300_000


@pytest.mark.parametrize("micro_batches", [4, 9])
def test_micro_batches_that_are_not_drawn_are_said(tmp_path: Path, micro_batches: int) -> None:
    run = read_run(simulated_run(tmp_path / "run", gradient_accumulation_steps=micro_batches, seq_len=64))
    write_report([run], tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    said = re.search(r"the step's 9 micro batches (\d) are drawn", page.text)
    assert (said is not None) == (micro_batches == 9)
    assert said is None or int(said[1]) in (4, 5)


def test_nothing_comes_from_the_network(runs: dict[str, Path], tmp_path: Path) -> None:
    write_report([read_run(runs["simulated"])], tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    addresses = [
        a[key] for _, a in page.elements for key in ("src", "href", "action", "data", "poster") if a.get(key)
    ]
    assert all(address.startswith(("#", "data:")) for address in addresses if address)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "'unsafe-inline'" not in policy.split("style-src")[0]
    assert len(page.scripts) == 1 + policy.count("'sha256-")  # all but the data may run, nothing else


def test_a_run_with_everything_shows_everything(call: Call, runs: dict[str, Path]) -> None:
    status, _, _ = call(runs["simulated"], "--out", "it.html")
    page = Page(Path("it.html").read_text(encoding="utf-8"))
    assert status == 0
    for heading in (
        "By module",
        "By calling code",
        "Segments and fragmentation",
        "Napkin, simulated, measured",
        "Roofline",
    ):
        assert heading in page.text
    data = page.data["runs"][0]
    assert set(data) >= {"history", "segments", "phases", "answers", "roofline", "icicles", "capacity"}


def test_what_a_snapshot_cannot_say_is_said(call: Call, tmp_path: Path) -> None:
    status, _, err = call(write_hand_made(tmp_path / "x"))
    assert status == 0
    assert "report.html" in err
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert "A snapshot by itself has no recipe, no time by phase" in page.text
    assert "Phases of a step" not in page.text
    assert "Segments and fragmentation" in page.text


def test_a_profile_alone_has_no_timeline(call: Call, runs: dict[str, Path]) -> None:
    status, _, _ = call(runs["simulated"] / "profile.json")
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert status == 0
    assert "there is no memory history, so there is no timeline" in page.text.lower()
    assert "history" not in page.data["runs"][0]


def test_a_snapshot_in_json_says_the_same(runs: dict[str, Path], tmp_path: Path) -> None:
    snapshot = read_snapshot(runs["simulated"] / "snapshot.pickle")
    (tmp_path / "snapshot.json").write_text(snapshot_to_json(snapshot))
    one, other = read_run(runs["simulated"] / "snapshot.pickle"), read_run(tmp_path / "snapshot.json")
    assert one.history is not None
    assert other.history is not None
    assert one.history.by_group().tolist() == other.history.by_group().tolist()


def test_several_runs_are_compared(call: Call, runs: dict[str, Path]) -> None:
    status, _, _ = call(runs["simulated"], runs["longer"])
    page = Page(Path("report.html").read_text(encoding="utf-8"))
    assert status == 0
    assert ("div", "overlay") in [(tag, a.get("id")) for tag, a in page.elements]
    recipes, numbers = difference_tables([read_run(runs["simulated"]), read_run(runs["longer"])])
    assert [[cell.value for cell in row] for row in recipes.rows] == [["seq_len", "16", "32"]]
    one, other = (StepProfile.read(runs[name] / "profile.json") for name in ("simulated", "longer"))
    peaks = [profile.memory.peak_allocated_bytes or 0 for profile in (one, other)]
    first = [cell.value for cell in numbers.rows[0]]
    assert first[:4] == ["total", "peak allocated", *peaks]
    assert first[4:] == [peaks[1] - peaks[0], pytest.approx(peaks[1] / peaks[0] - 1)]


def test_profiles_of_one_recipe_stand_side_by_side(call: Call, runs: dict[str, Path], tmp_path: Path) -> None:
    measured = StepProfile.read(runs["simulated"] / "profile.json").model_copy(update={"source": "measured"})
    (tmp_path / "measured.json").write_text(measured.to_json())
    status, out, _ = call(runs["simulated"], "measured.json", "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert status == 0
    found = {row["column"]: row["value"] for row in rows if row["row"] == "total / peak allocated"}
    assert found["simulated"] == found["measured"] == str(measured.memory.peak_allocated_bytes)
    assert (found["unexplained by simulated"], found["simulated / measured"]) == ("0", "1.0")
    assert int(found["napkin"]) > 0


def test_what_is_missing_is_simulated_when_asked(call: Call, runs: dict[str, Path]) -> None:
    for flags, sources in (
        ([], {"napkin", "measured"}),
        (["--simulate"], {"napkin", "simulated", "measured"}),
    ):
        status, out, _ = call(runs["measured"], "--csv", *flags)
        peaks = [row for row in csv.DictReader(io.StringIO(out)) if row["row"] == "total / peak allocated"]
        known = {row["column"] for row in peaks if row["value"]}
        assert status == 0
        assert known & {"napkin", "simulated", "measured"} == sources


def test_csv_holds_the_profile_s_numbers(call: Call, runs: dict[str, Path]) -> None:
    status, out, err = call(runs["measured"], "--csv")
    assert (status, err) == (0, "")
    rows = {
        (r["table"], r["row"], r["column"]): (r["value"], r["unit"]) for r in csv.DictReader(io.StringIO(out))
    }
    profile = json.loads((runs["measured"] / "profile.json").read_text())
    for name, stats in profile["phases"].items():
        assert rows["One step by phase", name, "time, median"] == (str(stats["time_s"]["median"]), "s")
        assert rows["One step by phase", name, "p90"] == (str(stats["time_s"]["p90"]), "s")
        assert rows["One step by phase", name, "peak allocated"] == (
            str(stats["peak_allocated_bytes"]),
            "bytes",
        )
        assert rows["One step by phase", name, "peak reserved"] == ("", "bytes")  # unknown is not 0
    for name, size in profile["memory"]["at_peak"].items():
        category = name.removesuffix("_bytes")
        assert rows["Memory at the peak by category", category, "bytes"] == (str(size), "bytes")
    for name, value in profile["recipe"].items():
        assert rows["Recipe, every field", name, "value"][0] == (
            value if isinstance(value, str) else json.dumps(value)
        )


def test_markdown_holds_the_profile_s_numbers(call: Call, runs: dict[str, Path]) -> None:
    status, out, _ = call(runs["simulated"], "--markdown")
    profile = StepProfile.read(runs["simulated"] / "profile.json")
    assert status == 0
    assert profile.memory.peak_allocated_bytes is not None
    assert f"| peak allocated | {profile.memory.peak_allocated_bytes / 2**10:,.1f} KiB |" in out or (
        f"| peak allocated | {profile.memory.peak_allocated_bytes / 2**20:,.1f} MiB |" in out
    )
    tables = [block for block in out.split("\n\n") if block.startswith("|")]
    assert len(tables) > 5
    for table in tables:  # GitHub drops a table whose rows differ in width
        widths = {line.replace("\\|", "").count("|") for line in table.strip().splitlines()}
        assert len(widths) == 1, table


def test_a_snapshot_alone_says_in_markdown_what_fills_the_peak(call: Call, runs: dict[str, Path]) -> None:
    status, out, _ = call(runs["measured"] / "snapshot.pickle", "--markdown")
    history = read_run(runs["measured"] / "snapshot.pickle").history
    assert status == 0
    assert history is not None
    _, _, table = out.partition("### Allocations at the peak\n")
    rows = [re.split(r" (?<!\\)\| ", line) for line in table.splitlines() if line.startswith("| ")]
    assert sum(int(row[4]) for row in rows[2:]) == len(history.live_at(history.peak()[0]))


def test_pictures_for_slides(call: Call, runs: dict[str, Path]) -> None:
    status, _, err = call(runs["simulated"], "--png", "slides/new")
    assert status == 0
    written = sorted(Path("slides/new").iterdir())
    assert [path.name.removeprefix("simulated-") for path in written] == [
        "answers.png",
        "phases.png",
        "roofline.png",
        "timeline.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written)
    assert all(str(path) in err for path in written)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """In a stack, a recipe, a file's name: not one becomes an element, and the data stay JSON."""
    run = read_run(write_hand_made(tmp_path, HOSTILE))
    recipe = {"model": HOSTILE, HOSTILE: "</script><script>", "data": "\u2028<!--"}
    run.profile = StepProfile(
        source="measured",
        recipe=recipe,
        hardware=HardwareSummary(name=HOSTILE, kind="cuda", memory_bytes=16 * MIB),
        provenance={HOSTILE: [HOSTILE]},
        memory=MemoryStats(
            kind="cuda_allocator", peak_phase=HOSTILE, peak_allocated_bytes=1, at_peak_by_module={HOSTILE: 1}
        ),
    )
    run.name = HOSTILE
    write_report([run, ReportRun(HOSTILE, run.profile)], tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    clean = render_page(
        "base.html",
        title="",
        data={},
        scripts=("columns.js", "timeline.js", "charts.js", "stacked.js", "overlay.js", "report.js"),
    )
    assert [attributes for attributes, _ in page.scripts] == [
        attributes for attributes, _ in Page(clean).scripts
    ]
    assert "img" not in [tag for tag, _ in page.elements]
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert HOSTILE in page.text  # it is there, as text
    assert page.data["runs"][0]["name"] == HOSTILE
    assert any(HOSTILE in line for line in page.data["runs"][0]["history"]["lines"])


def test_data_cannot_end_its_element() -> None:
    value = {"</script>": ["<!--", "\u2028", "&amp;"]}
    text = script_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)
    with pytest.raises(ValueError, match="Out of range float"):
        script_json(float("nan"))


def test_differences_have_their_sign() -> None:
    assert Cell(3 * MIB, "bytes", signed=True).shown == "+3.0 MiB"
    assert Cell(-0.05, "s", signed=True).shown == "-50.0 ms"
    assert Cell(0, "bytes", signed=True).shown == "0 B"
    assert Cell(0.1234, "share", signed=True).shown == "+12.3%"


def test_hostile_text_in_markdown_and_csv() -> None:
    table = Table(
        "a | b", ("what", "value"), [(Cell("=1+1 | <b>"), Cell("@x\n# y")), (Cell("n"), Cell(-5, "bytes"))]
    )
    markdown = to_markdown([table])
    assert "<b>" not in markdown
    assert len([line for line in markdown.splitlines() if line.startswith("|")]) == 4
    assert "\n# y" not in markdown
    rows = list(csv.reader(io.StringIO(to_csv([table]))))
    assert rows[1] == ["a | b", "'=1+1 | <b>", "value", "'@x\n# y", "text"]
    assert rows[2] == ["a | b", "n", "value", "-5", "bytes"]  # a number is no formula


def test_a_run_out_of_memory_says_what_would_help(tmp_path: Path, runs: dict[str, Path]) -> None:
    profile = StepProfile.read(runs["simulated"] / "profile.json")
    profile.oom = OutOfMemoryReport(phase="backward", requested_bytes=2 * MIB, advice=["micro_batch_size=1"])
    write_report([ReportRun("it", profile)], tmp_path / "report.html")
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    assert "out of memory in backward, asking for 2.0 MiB" in text
    assert "micro_batch_size=1" in text


def test_a_profile_of_which_nothing_is_known_has_a_page(tmp_path: Path) -> None:
    profile = StepProfile(
        source="measured",
        recipe={},
        hardware=HardwareSummary(name="x", kind="cpu"),
        memory=MemoryStats(kind="closed_form"),
    )
    write_report([ReportRun("nothing", profile)], tmp_path / "report.html")
    assert "Recipe and provenance" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).text


def roofline_profile(source: Any, bytes_moved: int | None) -> StepProfile:
    phases = {
        "forward": PhaseStats(time_s=TimeStats(median=0.01), flops=10**12, bytes_moved=bytes_moved),
        "optimizer_step": PhaseStats(time_s=TimeStats(median=0.02), flops=0, bytes_moved=bytes_moved),
    }
    hardware = HardwareSummary(name="x", kind="table", peak_flops=1e15, memory_bandwidth=2e12)
    memory = MemoryStats(kind="closed_form")
    return StepProfile(source=source, recipe={}, hardware=hardware, memory=memory, phases=phases)


def test_a_run_of_which_no_phase_was_timed_has_no_chart_of_times(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    """As a program that was watched on a virtual GPU; the chart of peaks stays."""
    for timed in (True, False):
        run = read_run(runs["simulated"])
        assert run.profile is not None
        for stats in run.profile.phases.values() if not timed else ():
            stats.time_s.median = None
        write_report([run], tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert ('id="run0-times"' in page) == timed
        assert 'id="run0-peaks"' in page


def test_a_roofline_by_hand() -> None:
    # 1e12 FLOPs over 1e10 bytes: 100 FLOP/B, where 2e12 B/s allow 2e14 FLOP/s; in 10 ms it is 1e14, half
    found = roofline_of(roofline_profile("simulated", 10**10))
    assert isinstance(found, PhaseRoofline)
    rows = {row[0].value: dict(zip(found.table().columns, row, strict=True)) for row in found.table().rows}
    assert rows["forward"]["intensity"].value == 100
    assert rows["forward"]["reached"].value == pytest.approx(1e14)
    assert rows["forward"]["of its ceiling"].value == pytest.approx(0.5)
    # no FLOPs: 1e10 bytes in 20 ms is 5e11 of 2e12 B/s
    assert rows["optimizer_step"]["of its ceiling"].value == pytest.approx(0.25)
    assert [point["phase"] for point in found.data()["points"]] == ["forward"]


def test_a_measured_roofline_borrows_the_bytes_and_says_so() -> None:
    measured = roofline_profile("measured", None)
    assert isinstance(roofline_of(measured), str)
    napkin, simulated = roofline_profile("napkin", 5), roofline_profile("simulated", 10**10)
    found = roofline_of(measured, [napkin, simulated])
    assert isinstance(found, PhaseRoofline)
    assert found.points[0].bytes_moved == 10**10
    assert "the simulated answer's" in found.note
