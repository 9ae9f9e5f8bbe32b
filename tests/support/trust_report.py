"""What the tests of trust tried and what happened, kept for docs/trust.md (`make trust`)."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import pytest

from tests.support.places import TESTS


@dataclass
class Row:
    """One fault: what was done how often, and what came of it, by which test."""

    area: str
    fault: str
    outcome: str
    test: str
    times: int = 0


class Tried(Protocol):
    """Note a fault that was tried. Called at the end of a test, when everything in it has held."""

    def __call__(self, area: str, fault: str, outcome: str, times: int = 1) -> None: ...


_rows: dict[tuple[str, ...], Row] = {}


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> Tried:
    """Note what this test tried."""
    test = f"{request.path.relative_to(TESTS)}::{request.node.originalname}"

    def note(area: str, fault: str, outcome: str, times: int = 1) -> None:
        row = Row(area, fault, outcome, test)
        kept = _rows.setdefault((area, fault, outcome, test), row)  # the cases of one test make one row
        kept.times += times

    return note


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trust-json", type=Path, help="Write what was tried and what happened here.")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--trust-json")
    if path is not None and exitstatus == 0:  # of a failed run there is nothing to tell
        path.write_text(
            json.dumps([asdict(row) for row in _rows.values()], indent=1) + "\n", encoding="utf-8"
        )
