"""The times of docs/ask.md, from profiles/ask_speed.json, which `python -m benchmarks.speed.ask` writes.

python -m pages.ask.guide             write them
python -m pages.ask.guide --check     fail if they are not so
python -m pages.ask.guide --picture   draw the page, by a browser: docs/pictures/ask.png and ask-phone.png
"""

import json
import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from pages.ask.serving import answering
from pages.parts import with_parts, write_or_check

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "ask.md"
TIMES = ROOT / "profiles" / "ask_speed.json"
PICTURES = ROOT / "docs" / "pictures"
QUERY = "?recipe=llama-3.1-8b-lora&micro_batch_size=4&hardware=rtx-4090"
SIZES = {"ask": (1280, 860, 1), "ask-phone": (390, 780, 3)}
"""Width, height and how many points of the screen one of them is."""


def times() -> str:
    """Markdown: the two places, their first answers and changes."""
    found = json.loads(TIMES.read_bytes())
    lines = ["| | first answer, cold | each change |", "| --- | ---: | ---: |"]
    for name, title in (("serve", "`harness serve`"), ("static", "the static site")):
        first, change = found[name]["first_answer_s"], found[name]["change_s"]
        lines.append(f"| {title} | {first['median']:.2f} s | {change['median'] * 1e3:.0f} ms |")
    size, busy = found["static"]["site_bytes"] / 2**20, found["others_at_work"]
    how = f"Medians of {first['n']} starts and {change['n']} changes, Chromium {found['browser']} on "
    how += (
        f"{found['provenance']['cpus']} cores, whose load was {busy} meanwhile. The site is {size:.1f} MiB."
    )
    return "\n".join([*lines, "", how]) + "\n"


def draw() -> None:
    """The page with an answer by arithmetic, as it is on a screen and on a phone."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from harness.serve import server_of

    with (
        tempfile.TemporaryDirectory() as folder,
        answering(server_of(_made(Path(folder, "runs")), 0)) as address,
        sync_playwright() as driver,
    ):
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, scale) in SIZES.items():
            viewport = {"width": width, "height": height}
            page = chromium.new_page(viewport=viewport, device_scale_factor=scale, color_scheme="light")  # type: ignore[arg-type]
            page.goto(f"{address}{QUERY}")
            page.wait_for_selector("html[data-answered=simulated]", timeout=120_000)
            page.wait_for_selector(".progress progress", state="detached", timeout=300_000)
            picture = Image.open(BytesIO(page.screenshot()))
            picture.quantize(256).save(PICTURES / f"{name}.png", optimize=True)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main(arguments: list[str]) -> None:
    """Write the times, or compare them, or draw."""
    if "--picture" in arguments:
        return draw()
    parts = {"times": times()}
    return write_or_check({PAGE: with_parts(PAGE, parts)}, "pages.ask.guide", check="--check" in arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
