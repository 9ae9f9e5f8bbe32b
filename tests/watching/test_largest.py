"""`harness watch --fit`: the largest value that does not run out of memory."""

import sys
from pathlib import Path

import pytest

from harness.errors import InputError
from harness.step_profile import HardwareSummary, MemoryStats, StepProfile
from harness.watching.largest import (
    MOST_GUESSES,
    Try,
    Values,
    expected_largest,
    largest_that_fits,
    parse_values,
    with_value,
)
from tests.support.commands import run_harness

PROGRAM = """
import os, sys
import torch
from torch import nn
rows = int(os.environ.get("BS") or sys.argv[1])
print("rows", rows)
if rows == 9:
    raise SystemExit("nothing of memory")
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(2**57 if rows > 5 else rows, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("most", [1, 2, 7, 64, 100])
def test_it_is_found_in_few_tries(most: int) -> None:
    for largest in range(most + 3):
        tries: list[int] = []

        def fits(value: int, largest: int = largest, tries: list[int] = tries) -> bool:
            tries.append(value)
            return value <= largest

        found = largest_that_fits(Values("BS", 1, most), fits)
        assert found == (min(largest, most) or None)
        assert len(tries) == len({*tries})
        assert len(tries) <= 2 * most.bit_length() + 1
        assert all(1 <= value <= most for value in tries)
    assert largest_that_fits(Values("BS", 3, 3), lambda value: value <= 3) == 3


@pytest.mark.parametrize("guess", [-5, 0, 1, 17, 63, 10**6])
def test_a_wrong_expectation_costs_a_few_tries_and_nothing_else(guess: int) -> None:
    for largest in range(66):
        tries: list[int] = []

        def fits(value: int, largest: int = largest, tries: list[int] = tries) -> bool:
            tries.append(value)
            return value <= largest

        found = largest_that_fits(Values("BS", 1, 64), fits, lambda: guess)
        assert found == (min(largest, 64) or None)
        assert len(tries) == len({*tries}) <= 2 * 7 + 1 + MOST_GUESSES
        assert all(1 <= value <= 64 for value in tries)


def test_a_second_device_is_tried_where_the_first_says_that_it_is_full() -> None:
    """The process takes 3 bytes and 2 for each row: 48 rows fit in 100 bytes and 248 in 500."""

    def searched(memory: int, earlier: list[Try]) -> list[Try]:
        tries: list[Try] = []

        def fits(value: int) -> bool:
            hardware = HardwareSummary(name="card", kind="table", memory_bytes=memory)
            stats = MemoryStats(kind="cuda_allocator", process_bytes=3 + 2 * value)
            profile = StepProfile(source="emulated", command=["train.py"], hardware=hardware, memory=stats)
            tries.append(Try(value, profile, 3 + 2 * value <= memory, Path()))
            return tries[-1].fits

        found = largest_that_fits(Values("BS", 1, 300), fits, lambda: expected_largest(tries, earlier))
        assert found == (memory - 3) // 2
        return tries

    first = searched(100, [])
    assert [one.value for one in first] == [1, 2, 48, 49]
    assert [one.value for one in searched(500, first)] == [1, 248, 249]


EVALUATES = """
import os
import torch
from torch import nn
model = nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.ones(4, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
with torch.no_grad():
    kept = [model(torch.ones(4096, 256)) for _ in range(int(os.environ["BS"]))]
"""


def test_the_peak_of_a_program_is_where_it_takes_the_most(tmp_path: Path) -> None:
    """Its evaluation: BS answers and the inputs of one, of 4,096 rows of 256 numbers of 4 bytes each, and the
    layer's weights and bias."""
    (tmp_path / "train.py").write_text(EVALUATES)
    words = ["watch", "--out", "run", "--fit", "BS=2..2", "--", sys.executable, "train.py"]
    done = run_harness(*words, cwd=tmp_path)
    (row,) = [line.split() for line in done.stderr.splitlines() if line.split()[:2] == ["2", "fits"]]
    peak = (2 + 1) * 4096 * 256 * 4 + (256 * 256 + 256) * 4
    assert row[2:5] == [f"{peak / 2**20:.1f}", "MiB", "evaluation"]


def test_where_the_value_goes() -> None:
    values = Values("BS", 1, 4)
    assert with_value(["python", "t.py"], values, 3) == (["python", "t.py"], {"BS": "3"})
    assert with_value(["t.py", "--rows={}"], values, 3) == (["t.py", "--rows=3"], {})
    assert with_value(["t.py", "{}", "a{BS}b"], values, 3) == (["t.py", "{}", "a3b"], {})


@pytest.mark.parametrize(
    "text", ["BS", "BS=", "BS=1", "BS=0..4", "BS=4..1", "1..4", "B-S=1..4", "BS=1..x", "BS=-1..4"]
)
def test_what_is_refused(text: str) -> None:
    assert parse_values("micro_batch=2..64") == Values("micro_batch", 2, 64)
    with pytest.raises(InputError, match="as in --fit BS=1"):
        parse_values(text)


def watch(folder: Path, *words: str, status: int = 0) -> str:
    (folder / "train.py").write_text(PROGRAM)
    done = run_harness("watch", "--steps", "1", "--out", "run", *words, cwd=folder, status=status)
    return " ".join(done.stderr.split())


def test_a_program_by_a_variable(tmp_path: Path) -> None:
    said = watch(tmp_path, "--fit", "BS=1..8", "--", sys.executable, "train.py")
    tries = ["BS=1: fits", "BS=2: fits", "BS=4: fits", "BS=8: runs out of memory"]
    tries += ["BS=6: runs out of memory", "BS=5: fits"]
    assert all(f"this machine, {one}" in said for one in tries)
    assert "this machine: the largest BS is 5: takes" in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {f"BS-{n}" for n in (1, 2, 4, 5, 6, 8)}
    assert (tmp_path / "run/BS-5/output.txt").read_text() == "rows 5\n"
    assert "is not empty" in watch(tmp_path, "--fit", "BS=1..8", "--", "true", status=2)


def test_a_program_by_its_words(tmp_path: Path) -> None:
    said = watch(tmp_path, "--fit", "rows=2..4", "--", sys.executable, "train.py", "{}")
    assert "the largest rows is 4: takes" in said
    assert "no larger one was to be tried" in said


def test_none_fits_or_it_fails_otherwise(tmp_path: Path) -> None:
    said = watch(tmp_path, "--fit", "BS=6..8", "--", sys.executable, "train.py", status=3)
    assert "this machine: not even BS=6 fits" in said
    said = watch(tmp_path, "--out", "other", "--fit", "BS=9..9", "--", sys.executable, "train.py", status=2)
    assert "with 9 the command ended with status 1, and not out of memory" in said
