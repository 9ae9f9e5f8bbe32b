"""The page that asks under axe-core, which npm has: without it, and without a registry, this skips."""

import subprocess
import tarfile
from typing import Any

import pytest

from harness.serve.server import server_of
from pages.ask.serving import answering
from tests.support.places import ROOT

AXE = "4.14.1"
KEPT = ROOT / "build" / "axe"


@pytest.fixture(scope="module")
def axe() -> str:
    package = KEPT / f"axe-core-{AXE}.tgz"
    if not package.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"axe-core@{AXE}"]
        try:
            subprocess.run(command, cwd=KEPT, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"axe-core cannot be had: {error}")
    with tarfile.open(package) as files:
        found = files.extractfile("package/axe.min.js")
        assert found is not None
        return found.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize(
    "query",
    [
        "?recipe=llama-3.1-8b-lora&micro_batch_size=8&hardware=rtx-4090",
        "?recipe=llama-3.1-8b-qlora&adapter=none",
        "?recipe=llama-3.2-1b-bf16&and=recipe%3Dllama-3.2-1b-bf16%26attention%3Deager",
    ],
    ids=["does not fit", "impossible", "two"],
)
def test_axe_finds_no_violation(
    query: str, width: int, scheme: str, axe: str, browser: Any, serving: str
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
    page.goto(f"{serving}{query}")
    page.wait_for_selector(".verdict:not(:empty)")
    for summary in page.locator("summary").all():
        summary.click()
    page.evaluate(axe)
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")
    page.close()
    assert [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found["violations"]] == []


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with answering(server_of(tmp_path_factory.mktemp("runs"), 0)) as address:
        yield address
