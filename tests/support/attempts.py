"""Trying broken and hostile input: what may happen, and how often it did.

FUZZ examples of each kind are tried (`make fuzz`), a dozen where it is not set; always the same ones.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from harness.errors import LONGEST_MESSAGE, HarnessError
from tests.support.trust_report import Tried
from tests.support.watched import watched

EXAMPLES = int(os.environ.get("FUZZ", "12"))
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,  # `watched` stops what takes too long
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
T = TypeVar("T")


class Count:
    """How many inputs were tried, how many of them were refused, and what was said to the last of those."""

    def __init__(self) -> None:
        self.inputs = self.refused = 0
        self.said = ""


@pytest.fixture
def count(request: pytest.FixtureRequest, tried: Tried) -> Iterator[Count]:
    """Counts what a test tries, and reports it under the first line of its docstring."""
    counted = Count()
    yield counted
    if counted.inputs < EXAMPLES:  # the test failed
        return
    good = counted.inputs - counted.refused
    outcome = f"{counted.refused:,} refused in a sentence, {good:,} read; no traceback, none over 10 s"
    tried("Fuzzed input", request.function.__doc__.splitlines()[0].rstrip("."), outcome, times=counted.inputs)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def attempt(count: Count, folder: Path, do: Callable[[], T]) -> T | None:
    """What `do` returns; None when it refuses in a message that can be shown."""
    count.inputs += 1
    with watched(folder):
        try:
            return do()
        except HarnessError as error:
            count.refused += 1
            count.said = message = str(error)
            assert message.encode().decode().replace("\n", " ").isprintable()
            assert 20 < len(message) < 6 * LONGEST_MESSAGE, message
            return None


def written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path
