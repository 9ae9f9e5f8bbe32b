"""How long the page that asks takes to its first answer and to each change, in a browser.

    python -m benchmarks.speed.ask [--out profiles/ask_speed.json]

Of harness serve and of the static site (`python -m pages.ask.site`), which a web server on this machine gives
out. Each start is a new browser profile with nothing in its cache. Wants chromium and playwright.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pages.ask.site
from benchmarks.command import parser_of
from harness.serve import server_of
from harness.system import provenance, write_whole
from pages.ask.serving import answering, files_of

STARTS, CHANGES = 5, 20
QUERY = "?recipe=llama-3.1-8b-qlora&hardware=rtx-4090"
FIRST = """() => new Promise((resolve) => {
  const answered = () => document.documentElement.dataset.answered;
  const look = () => (answered() ? resolve(performance.now()) : setTimeout(look, 5));
  look();
})"""
"""Milliseconds from the beginning of the navigation to the answer."""
CHANGE = """(seq_len) => new Promise((resolve) => {
  const box = [...document.querySelectorAll("input")].find((one) => one.labels[0]?.textContent === "seq_len");
  const command = document.querySelector(".answer");
  const begun = performance.now();
  const watcher = new MutationObserver(() => {
    if (!command.querySelector("pre")?.textContent.includes(`seq_len=${seq_len} `)) return;
    watcher.disconnect();
    resolve(performance.now() - begun);
  });
  watcher.observe(command, { childList: true, subtree: true, characterData: true });
  box.value = seq_len;
  box.dispatchEvent(new Event("input", { bubbles: true }));
})"""
"""Milliseconds from a key to the drawn answer."""


def measured(chromium: Any, address: str) -> dict[str, Any]:
    """Times at one place, in seconds."""
    firsts: list[float] = []
    changes: list[float] = []
    for start in range(STARTS):
        context = chromium.new_context()
        page = context.new_page()
        page.goto(address + QUERY)
        firsts.append(page.evaluate(FIRST) / 1e3)
        if start == STARTS - 1:
            changes = [page.evaluate(CHANGE, 64 * n) / 1e3 for n in range(5, 5 + CHANGES)]
        context.close()
    return {
        "first_answer_s": {"median": median(firsts), "most": max(firsts), "n": STARTS},
        "change_s": {"median": median(changes), "most": max(changes), "n": CHANGES},
    }


def main() -> None:
    """Measure, print, and write where asked."""
    from playwright.sync_api import sync_playwright

    parser = parser_of("benchmarks.speed.ask", __doc__)
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with answering(server_of(Path(folder), 0)) as address:
            found["serve"] = measured(chromium, address)
        pages.ask.site.main(Path(folder, "ask"))
        with answering(files_of(Path(folder))) as address:
            found["static"] = measured(chromium, f"{address}ask/")
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
        found["static"]["site_bytes"] = size
        found["browser"] = chromium.version
        chromium.close()
    found["others_at_work"] = round(os.getloadavg()[0], 1)
    found["provenance"] = provenance()
    text = json.dumps(found, indent=1)
    print(text)
    if out is not None:
        write_whole(out, text.encode() + b"\n")


if __name__ == "__main__":
    main()
