"""One browser for all tests here: an installed chromium, driven by playwright. Without either they skip."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        # no sandbox: in a container there is none, and the pages are our own
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Window:
    """A page, what it complained about on its console, and what it asked for."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.page = browser.new_page(viewport={"width": 1600, "height": 900}, color_scheme="light")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.absolute().as_uri())

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def close(self) -> None:
        """Fails when there was an error on the console, or anything asked of the network."""
        self.page.close()
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@pytest.fixture(scope="module")
def opened(browser: Any) -> Iterator[Callable[[Path], Any]]:
    """Open a file in a new page. What the pages complained about fails the module's last test."""
    windows: list[Window] = []

    def open_page(path: Path) -> Any:
        windows.append(Window(browser, path))
        return windows[-1].page

    yield open_page
    for window in windows:
        window.close()
