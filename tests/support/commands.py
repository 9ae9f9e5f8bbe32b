"""The command line, called in the test's own process."""

import sys
from collections.abc import Callable

import pytest

Call = Callable[..., tuple[int, str, str]]
"""`harness *words`: exit status, stdout, stderr."""


def exit_status(*words: object) -> int:
    """Of `harness *words`."""
    from harness.cli.app import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["harness", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
    return int(ended.value.code or 0)
