"""Every page, table and picture is of its committed results: `make pages CHECK=--check`, one by one."""

import re
import runpy
import sys

import pytest

from tests.support.places import ROOT

(LISTED,) = re.findall(r"^PAGES = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", LISTED.split())
def test_a_page_is_of_its_results(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [page, "--check"])
    monkeypatch.chdir(ROOT)
    status: object = None
    try:
        runpy.run_module(f"pages.{page}", run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    assert not status, status
