"""`harness doctor`."""

import json
from typing import Annotated

import typer

from harness.cli.terminal.doctor import print_findings
from harness.cli.terminal.progress import Waiting
from harness.cli.terminal.terminal import Terminal
from harness.system import quiet_libraries, stdout_kept_for_json


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check GPU, driver, versions, and which toggles can work here, each by trying it."""

    with stdout_kept_for_json(as_json):
        quiet_libraries()
        from harness.measure import examine

        with Waiting(Terminal(stderr=True), "trying every toggle on a tiny model") as waiting:
            findings = examine(lambda name: waiting.now(f"trying on a tiny model: {name}"))
        if not as_json:
            print_findings(Terminal(), findings)
    if as_json:
        print(json.dumps(findings, indent=1))
