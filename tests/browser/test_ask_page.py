"""The page that asks, in a browser: worked questions by clicking, of the server and of the static site."""

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest

import pages.ask.site
from benchmarks.questions import QUESTIONS, RESULTS
from harness.serve.server import server_of
from pages.ask.serving import answering, files_of
from tests.support.commands import Call
from tests.support.releases import keeps_workspaces

FOUND = json.loads(RESULTS.read_bytes())
LIBRARIES = ("torch", "transformers", "peft")
SIMULATED_MS = 300_000
GOOD_SHIFT = 0.1
"""Of what is there already, while the page is used: web.dev/articles/cls."""
WATCH_SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""


class Asking:
    """A page that asks, opened at one place; what it complains about and whom it calls."""

    def __init__(self, browser: Any, place: str, query: str = "", **options: Any) -> None:
        self.place = place
        self.context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        self.page = self.context.new_page()
        self.page.set_default_timeout(SIMULATED_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.complaints.append(m.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.add_init_script(WATCH_SHIFTS)
        self.page.goto(f"{place}{query}")

    def close(self) -> None:
        """Fails for an error on the console, and for a request to anywhere else."""
        self.context.close()
        assert self.complaints == []
        origin = "{0.scheme}://{0.netloc}/".format(urlsplit(self.place))
        assert self.requests
        assert [url for url in self.requests if not url.startswith((origin, "data:", "blob:"))] == []

    def say(self, **fields: str | bool) -> None:
        """Set fields by their labels, opening what is folded."""
        for name, value in fields.items():
            label = {"recipe": "begin with", "hardware": "card"}.get(name, name)
            control = self.page.get_by_label(label, exact=True).first
            folded = control.locator("xpath=ancestor::details[not(@open)]/summary")
            if folded.count():
                folded.click()
            if isinstance(value, bool):
                control.set_checked(value)
            elif control.evaluate("one => one.tagName") == "SELECT":
                control.select_option(value)
            else:
                control.fill(value)
                control.press("Tab")

    def answered(self, source: str = "arithmetic") -> None:
        """Wait for it."""
        self.page.wait_for_selector(f"html[data-answered={source}]")

    @property
    def command(self) -> str:
        """The one that is shown."""
        return self.page.locator(".answer pre").first.inner_text()

    def asks_for(self, command: str) -> None:
        """Wait until the question is this one; in what order its words are does not matter."""
        wanted, end = sorted(shlex.split(command)), time.monotonic() + 30
        while sorted(shlex.split(self.command)) != wanted:
            assert time.monotonic() < end, (self.command, self.page.url, self.verdict)
            self.page.wait_for_timeout(50)

    @property
    def verdict(self) -> str:
        return self.page.locator(".verdict").first.inner_text()

    def row(self, name: str) -> str:
        tile = self.page.locator(".tile", has=self.page.get_by_text(name, exact=True)).first
        return " ".join(tile.locator("dd").all_inner_texts())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with answering(server_of(tmp_path_factory.mktemp("runs"), 0)) as address:
        yield address


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site below a path of its own, as any web server gives it out."""
    folder = tmp_path_factory.mktemp("site")
    try:
        pages.ask.site.main(folder / "some" / "where")
    except SystemExit as error:
        pytest.skip(f"without its registries: {error}")
    with answering(files_of(folder)) as address:
        yield f"{address}some/where/"


@pytest.fixture(params=["served", "static"])
def place(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(request.param)


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Asking]]:
    """Open the page; what it complained about fails the test."""
    pages_open: list[Asking] = []

    def open_page(place: str, query: str = "", **options: Any) -> Asking:
        pages_open.append(Asking(browser, place, query, **options))
        return pages_open[-1]

    yield open_page
    for one in pages_open:
        one.close()


DIVIDED = {"recipe": "llama-3.1-8b-full-bf16", "seq_len": "1024", "parallel": "fsdp", "dp_shard": "8"}
WORKED = {
    "evaluation": {
        "recipe": "llama-3.1-8b-lora", "seq_len": "1024", "hardware": "a100-80gb",
        "eval": True, "eval_batches": "20",
    },
    "checkpoint": {"recipe": "llama-3.2-1b-bf16", "hardware": "rtx-4090", "save": True},
    "evaluation-of-ranks": {**DIVIDED, "hardware": "h100", "eval": True, "eval_batches": "4"},
    "checkpoint-in-parts": {**DIVIDED, "hardware": "h100", "save": True},
    "checkpoint-whole": {**DIVIDED, "hardware": "h100", "save": True, "full_state_dict": True},
}  # fmt: skip
"""Questions of docs/questions.md, as they are clicked."""


@pytest.mark.parametrize("name", WORKED)
def test_the_worked_questions_by_clicking_have_the_answers_of_the_guide(
    name: str, opened: Callable[..., Asking], served: str
) -> None:
    recorded = FOUND["provenance"]["versions"]
    if any(recorded[library].split("+")[0] != version(library).split("+")[0] for library in LIBRARIES):
        pytest.skip("the answers are of other releases")
    asking = opened(served)
    asking.say(**WORKED[name])
    (command,) = QUESTIONS[name].commands
    asking.asks_for(command)
    asking.answered("simulated")
    shown = " ".join(FOUND["shown"][name].split())
    if shown.startswith(asking.page.get_by_label("begin with").input_value()):
        words = asking.verdict.removesuffix(".")
        assert f": {words[0].lower()}{words[1:]}" in shown
        number, gib, *rest = asking.row("peak, allocated").split()
        assert f"peak: {number} {gib} allocated, {' '.join(rest)}" in shown
    notes = " ".join(asking.page.locator(".answer .note").all_inner_texts())
    behind = re.split(r"GiB with the CUDA context ", shown)[-1]
    assert behind in " ".join(notes.split())


@keeps_workspaces
@pytest.mark.parametrize("name", WORKED)
def test_the_worked_questions_by_clicking_have_the_numbers_of_napkin(
    name: str, opened: Callable[..., Asking], place: str, call: Call
) -> None:
    asking = opened(place)
    training = {field: said for field, said in WORKED[name].items() if not field.startswith("eval")}
    training = {field: said for field, said in training.items() if field not in ("save", "full_state_dict")}
    asking.answered()
    asking.say(**training)
    recipe, *rest = shlex.split(QUESTIONS[name].commands[0])[2:]
    words = [recipe, *(word for word in rest if "=" in word)]
    asking.asks_for(shlex.join(["harness", "simulate", *words]))
    _, printed, _ = call("napkin", *words, "--json")
    profile = json.loads(printed)
    assert asking.row("peak, allocated").startswith(
        f"{profile['memory']['peak_allocated_bytes'] / 2**30:,.2f} GiB"
    )
    assert asking.row("tokens/s").startswith(f"{profile['step']['tokens_per_s']:,.0f} ")


@keeps_workspaces
def test_two_questions_side_by_side(opened: Callable[..., Asking], served: str) -> None:
    """`harness diff before after` of docs/questions.md."""
    asking = opened(served, "?recipe=llama-3.2-1b-bf16")
    asking.answered()
    asking.page.get_by_role("button", name="Compare with a second question").click()
    second = asking.page.get_by_role("region", name="Question 2", exact=True)
    second.get_by_label("attention", exact=True).select_option("eager")
    second.get_by_text("25.4").first.wait_for()
    assert parse_qs(urlsplit(asking.page.url).query)["and"] == ["recipe=llama-3.2-1b-bf16&attention=eager"]
    for panel in (asking.page.get_by_role("region", name="Question 1", exact=True), second):
        panel.get_by_text("Answered simulated").wait_for()
    shown = " ".join(FOUND["shown"]["runs"].split())
    peaks = [panel.locator(".tile dd").first.inner_text() for panel in asking.page.locator(".panel").all()]
    assert f"peak allocated: {peaks[0]} and {peaks[1]}:" in shown
    again = opened(served, asking.page.url.removeprefix(served))
    again.page.get_by_role("region", name="Question 2", exact=True).get_by_text("attention=eager").wait_for()
    asking.page.get_by_role("button", name="Drop the second question").click()
    assert asking.page.locator(".panel").count() == 1
    assert "and" not in parse_qs(urlsplit(asking.page.url).query)


def test_an_impossible_pair_says_why_and_is_mended_by_a_click(
    opened: Callable[..., Asking], place: str
) -> None:
    asking = opened(place)
    asking.answered()
    asking.say(adapter="none")
    asking.page.get_by_text("quantized weights cannot be trained").first.wait_for()
    asking.page.get_by_role("button", name="Set quantization: none, double_quant: false").click()
    asking.page.get_by_text("full fine-tuning").first.wait_for(state="attached")
    asking.page.wait_for_selector(".verdict:not([data-fits=wrong])")
    assert asking.page.get_by_label("method", exact=True).input_value() == "full fine-tuning"
    assert "quantization=none" in asking.command


def test_the_cheapest_change_makes_it_fit_by_a_click(opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place, "?recipe=llama-3.1-8b-lora&micro_batch_size=8&hardware=rtx-4090")
    asking.answered()
    assert asking.verdict.startswith("Does not fit")
    asking.page.get_by_role("button", name="Change", exact=True).first.click()
    asking.page.wait_for_selector(".verdict[data-fits=yes]")
    assert "micro_batch_size=1" in asking.page.url


@pytest.mark.parametrize(
    "query",
    [
        "?" + urlencode({"model": "<img src=x onerror=alert(1)>", "hardware": '"><script>alert(2)</script>'}),
        "?recipe=__proto__&constructor=1",
        "?model=../../../../etc/passwd",
        "?model=javascript:alert(1)&trust_remote_code=true",
        "?recipe=llama-3.1-8b-qlora&and=" + quote("<script>alert(3)</script>&and=&and="),
        "?" + "a" * 5000,
        "?%ff%00&&==&=",
    ],
)
def test_a_hostile_address_is_text(query: str, opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place, query)
    asking.page.on("dialog", lambda dialog: asking.complaints.append("a dialog"))
    asking.page.wait_for_selector(".verdict[data-fits=wrong], .verdict[data-fits='']:not(:empty)")
    assert asking.page.locator("#questions img, #questions script, #questions iframe").count() == 0
    asking.say(recipe="smoke")  # and the form goes on
    asking.page.get_by_text("harness simulate smoke").first.wait_for()


def test_fifty_questions_typed_at_once_end_with_the_last(opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place)
    asking.answered()
    asking.page.get_by_label("seq_len", exact=True).evaluate(
        """async (box) => {
          for (let n = 1; n <= 50; n++) {
            box.value = 64 * n;
            box.dispatchEvent(new Event("input", { bubbles: true }));
          }
        }"""
    )
    asking.page.get_by_text("seq_len=3200").first.wait_for()
    asking.page.wait_for_selector(".answer:not(.old)")
    assert asking.page.get_by_label("seq_len", exact=True).input_value() == "3200"
    assert "seq_len=3200" in asking.page.url


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_as_wide_as_the_window_and_nothing_jumps(
    width: int, scheme: str, opened: Callable[..., Asking], place: str
) -> None:
    viewport = {"width": width, "height": 800}
    asking = opened(
        place,
        "?recipe=llama-3.1-8b-lora&micro_batch_size=4&hardware=rtx-4090",
        viewport=viewport,
        color_scheme=scheme,
    )
    asking.answered()
    asking.say(seq_len="1024")
    asking.page.get_by_text("seq_len=1024").first.wait_for()
    assert asking.page.evaluate("document.documentElement.scrollWidth") <= width
    assert asking.page.evaluate("window.shifted") < GOOD_SHIFT


def test_everything_can_be_reached_and_said_by_keyboard(opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place)
    asking.answered()
    keyboard, reached = asking.page.keyboard, []
    for _ in range(60):
        keyboard.press("Tab")
        reached.append(
            asking.page.evaluate(
                "document.activeElement.labels?.[0]?.innerText ?? document.activeElement.innerText"
            )
        )
        if reached[-1] == "micro_batch_size":
            keyboard.press("Control+a")
            keyboard.type("2")
        if reached[-1] == "Copy the command":
            break
    assert "begin with" in reached
    assert reached[-1] == "Copy the command"
    asking.page.get_by_text("micro_batch_size=2").first.wait_for()


def test_every_control_has_a_name_and_every_picture_words(opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place, "?recipe=llama-3.1-8b-lora&micro_batch_size=8&hardware=rtx-4090")
    asking.answered()
    nameless = asking.page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, summary")]
             .filter((one) => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel)
             .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    ids = asking.page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    assert "Does not fit" in asking.page.get_by_role("img").first.get_attribute("aria-label")
    assert asking.page.get_by_role("status").first.inner_text() == asking.verdict


def test_it_can_be_passed_on(opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place, "?recipe=llama-3.1-8b-qlora&hardware=rtx-4090")
    asking.context.grant_permissions(["clipboard-read", "clipboard-write"])
    asking.answered()
    asking.page.get_by_text("Pass it on").click()
    asking.page.locator(".progress progress").wait_for(state="detached")  # what was opened stays so
    for button, begins in (("Copy a Markdown table", "**llama-3.1-8b-qlora on"), ("Copy a badge", "![")):
        asking.page.get_by_role("button", name=button).click()
        asking.page.get_by_role("button", name="Copied").wait_for()
        assert asking.page.evaluate("navigator.clipboard.readText()").startswith(begins)
        asking.page.get_by_role("button", name=button).wait_for()
    for button, magic in (("Picture, SVG", b"<svg "), ("Picture, PNG", b"\x89PNG")):
        with asking.page.expect_download() as download:
            asking.page.get_by_role("button", name=button).click()
        assert Path(download.value.path()).read_bytes().startswith(magic)


def test_every_card_is_a_click_away(opened: Callable[..., Asking], place: str) -> None:
    asking = opened(place)
    asking.answered()
    asking.page.get_by_text("On every card").click()
    asking.page.get_by_role("button", name="L4 24 GB").click()
    asking.page.get_by_text("hardware=l4").first.wait_for()


def test_the_simulation_goes_on_to_a_report(opened: Callable[..., Asking], served: str, call: Call) -> None:
    asking = opened(served, "?recipe=smoke&seq_len=64&hardware=l4")
    asking.answered("simulated")
    link = asking.page.get_by_role("link", name="The report: timeline, layers, largest allocations")
    with asking.context.expect_page() as report:
        link.click()
    assert report.value.locator("h1").inner_text() == "smoke"
    asking.page.locator(".progress progress").wait_for(state="detached")
    _, printed, _ = call("fit", "smoke", "seq_len=64", "hardware=l4", "--json")
    assert asking.row("largest batch").startswith(f"{json.loads(printed)['largest_micro_batch_size']:,} ")


def test_a_config_of_ones_own_is_asked_about_without_leaving_the_page(
    opened: Callable[..., Asking], static: str
) -> None:
    from harness.recipe.file import find_model_config

    asking = opened(static, "?model=llama-3.2-1b&hardware=l4")
    asking.answered()
    before = asking.row("peak, allocated")
    config = find_model_config("llama-3.2-1b")
    assert config is not None
    asking.page.get_by_label("or a config.json of yours").set_input_files(str(config))
    asking.page.get_by_text("harness simulate config.json").first.wait_for()
    assert asking.row("peak, allocated") == before


def test_on_paper_the_bar_is_filled_and_the_verdict_is_there_once(
    opened: Callable[..., Asking], served: str
) -> None:
    asking = opened(served, "?recipe=smoke&hardware=l4", viewport={"width": 703, "height": 1000})
    asking.page.wait_for_selector(".bar span")
    asking.page.emulate_media(media="print")
    kept = "[...document.querySelectorAll('.bar span')].map((e) => getComputedStyle(e).printColorAdjust)"
    assert "exact" in asking.page.evaluate(kept)
    assert "economy" not in asking.page.evaluate(f"{kept}.slice(0, -1)")  # the last is the limit, a line
    assert not asking.page.is_visible(".short")
    asking.close()
