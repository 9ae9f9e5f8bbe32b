"""The guide in a browser: as wide as a phone, its menu in one row, the toggles beside their page."""

import subprocess
import sys
from pathlib import Path

import pytest

from pages.toggles import TOGGLES
from tests.support.places import ROOT

pytest.importorskip("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("width", [390, 1280])
def test_pages_are_as_wide_as_the_window_and_the_menu_is_one_row(browser, site: Path, width: int) -> None:
    window = browser.new_page(viewport={"width": width, "height": 800})
    pages = [path for path in sorted(site.glob("*.html")) if path.name != "404.html"]
    assert len(pages) >= 10
    for path in pages:
        window.goto(path.as_uri())
        assert window.evaluate("document.documentElement.scrollWidth") <= width, path.name
        assert window.evaluate("document.querySelector('.navbar').offsetHeight") < 70, path.name
    window.close()


def test_every_toggle_is_in_the_list_beside_the_page(browser, site: Path) -> None:
    window = browser.new_page(viewport={"width": 1280, "height": 800})
    window.goto((site / "toggles.html").as_uri())
    listed = window.locator(".bs-sidebar a").all_inner_texts()
    assert {toggle.field for toggle in TOGGLES} <= set(listed)
    assert window.evaluate(
        "(list => list.scrollWidth <= list.clientWidth)(document.querySelector('.bs-sidebar'))"
    )
    window.close()


@pytest.mark.parametrize(("scheme", "filtered"), [("light", False), ("dark", True)])
def test_pictures_follow_the_theme(browser, site: Path, scheme: str, filtered: bool) -> None:
    window = browser.new_page(color_scheme=scheme)
    window.goto((site / "timeline.html").as_uri())
    applied = window.evaluate("getComputedStyle(document.querySelector('[role=main] img')).filter")
    assert ("invert" in applied) == filtered
    window.close()
