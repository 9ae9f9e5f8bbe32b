"""What the tests that kill share: a process that forks commands, and the folder they start in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forked import Forks
from tests.support.places import LLAMA


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where every command starts: a recipe that takes about a second."""
    folder = tmp_path / "start"
    folder.mkdir()
    recipe = f"model: {LLAMA}\nprecision: fp32\nseq_len: 16\nwarmup_steps: 2\nsteps: 30\n"
    (folder / "mine.yaml").write_text(recipe)
    return folder
