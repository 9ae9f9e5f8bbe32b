"""Peaks that others measured and published, against napkin and simulate (profiles/published)."""

import json

import pytest

from benchmarks.published.__main__ import measured_bytes, napkin_answer
from benchmarks.published.cases import FOLDER, device_of, published_cases
from benchmarks.published.distributed import LATER, OFF, REASONS
from benchmarks.published.equivalents import GPUS
from benchmarks.published.kernels import allocated_row
from benchmarks.published.links import MEASURED
from benchmarks.published.links import RESULTS as LINKS_FILE
from benchmarks.published.links import row as link_row
from benchmarks.published.titan import told
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.check import check_recipe
from pages.profiles.published import errors_of
from tests.support.releases import keeps_workspaces

SEVERAL = json.loads((FOLDER / "distributed.json").read_text(encoding="utf-8"))
LINKS = json.loads(LINKS_FILE.read_text(encoding="utf-8"))["rows"]
RESULTS = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
EMULATED = json.loads((FOLDER / "emulated.json").read_text(encoding="utf-8"))
FSDP1 = json.loads((FOLDER / "fsdp1.json").read_text(encoding="utf-8"))
ROWS = {row["id"]: row for row in RESULTS["rows"]}
CASES = {case["id"]: case for case in published_cases()}
MODULES = [
    next(n for n in CASES if n.startswith(f"liger-kernel/{kernel}/huggingface"))
    for kernel in ("cross_entropy", "fused_linear_cross_entropy", "geglu", "rms_norm", "rope", "swiglu")
]


def test_every_case_has_its_row_and_what_was_published_is_unchanged():
    assert list(ROWS) == list(CASES)
    for name, case in CASES.items():
        assert ROWS[name]["measured_bytes"] == measured_bytes(case)
        assert ROWS[name]["out_of_memory"] == (case.get("status") == "OOM")


def test_bytes_of_published_units():
    assert measured_bytes({"measured": {"peak_allocated_GB": 21.3}}) == 21_300_000_000
    assert measured_bytes({"measured": {"peak_active_GiB": 0.5, "tokens_per_s": 3}}) == 2**29
    assert measured_bytes({"measured": {"peak_allocated_MiB": 256.328125}}) == 268_779_520
    assert measured_bytes({"measured": {"peak_allocated_GB": None}}) is None


def test_the_links_are_held_against_what_was_measured():
    assert [link_row(measured) for measured in MEASURED] == LINKS  # as the command writes it
    for each in LINKS:
        assert each["source"]
        assert each["reason"] or abs(each["seconds_off"]) < 0.05, each
    assert LINKS[6]["seconds_off"] == pytest.approx(482.26 / LINKS[6]["model_bus_gb_per_s"] - 1)
    large = [each for each in LINKS if each["ranks"] == 8 and (each["size_bytes"] or 2**30) >= 2**26]
    assert all(abs(each["seconds_off"]) < 0.2 for each in large)


@pytest.mark.parametrize(
    ("answer", "median", "largest", "rows"), [("napkin", 0.05, 0.15, 9), ("simulated", 0.01, 0.03, 93)]
)
def test_within_the_bars(answer, median, largest, rows):
    errors = errors_of(ROWS.values(), answer)
    assert errors.count == rows
    assert errors.median <= median
    assert errors.largest <= largest
    training = errors_of((row for name, row in ROWS.items() if name.startswith("litgpt")), answer)
    assert training.median <= median  # also without the kernels, which are exact


def test_what_ran_out_of_memory_runs_out_of_memory_simulated():
    ran_out = [row for row in ROWS.values() if row["out_of_memory"]]
    assert len(ran_out) == 6
    for row in ROWS.values():
        simulated = row["simulated_bytes"] is None and not row["simulated_left_out"]
        assert simulated == row["out_of_memory"], row["id"]


def test_what_virtual_gpus_made_of_rows_is_within_half_a_percent():
    known = {name.partition("/{")[0]: row for name, row in ROWS.items()}
    assert len(EMULATED["rows"]) >= 10
    for row in EMULATED["rows"]:
        measured = known[row["id"]]["measured_bytes"]
        assert (row["emulated_bytes"] is None) == known[row["id"]]["out_of_memory"]
        assert measured is None or row["emulated_bytes"] == pytest.approx(measured, rel=0.005)
        assert row["emulated_bytes"] == known[row["id"]]["simulated_bytes"]


@keeps_workspaces
def test_napkin_answers_as_committed():
    for name, row in ROWS.items():
        assert napkin_answer(CASES[name], device_of(CASES[name])) == (
            row["napkin_bytes"],
            row["napkin_left_out"],
        ), name


@keeps_workspaces
@pytest.mark.parametrize("name", MODULES)
def test_modules_simulate_as_committed(name):
    assert allocated_row(CASES[name], device_of(CASES[name])) == ROWS[name]["simulated_bytes"]


# Several GPUs -----------------------------------------------------------------------------------------


def test_every_row_of_several_gpus_is_built_or_left_out_for_a_reason():
    rows = SEVERAL["rows"]
    assert len({row["id"] for row in rows}) == len(rows) == 171
    assert sum(SEVERAL["counts"].values()) == 171
    known = {why for *_, why in REASONS} | {"batch, sequence or number of GPUs not stated", LATER}
    assert {row["left_out"] for row in rows if "error" not in row} <= known
    assert {row["left_out"] for row in rows if "error" in row} == {""}


SIMULATED = [row for row in SEVERAL["rows"] if "error" in row]
BY_ID = {row["id"]: row for row in SIMULATED}


@pytest.mark.parametrize(
    "row", [row for row in FSDP1["rows"] if "ran_out" not in row["at_once"]], ids=lambda row: row["id"]
)
def test_fsdp1_itself_is_nearer_than_fsdp2_where_that_is_far_off(row):
    measured = BY_ID[row["id"]]
    ways = ("at_once", "by_clock", "late")
    errors = [row[when]["reserved_bytes"] / measured["measured_bytes"] - 1 for when in ways]
    if abs(measured["error"]) > 2 * OFF:
        assert max(map(abs, errors)) < abs(measured["error"])
    if "peak_allocated_gib" in measured:
        allocated = row["at_once"]["allocated_bytes"] / 2**30
        assert round(allocated, 2) == measured["peak_allocated_gib"]  # as many digits as were published


@keeps_workspaces
@pytest.mark.parametrize("row", SIMULATED, ids=lambda row: row["id"])
def test_a_built_row_says_what_it_was_made_of_and_why_it_is_off(row):
    measured = float(row["peak_memory"]) * {"GB": 10**9, "GiB": 2**30}[row["unit"]]
    assert row["error"] == pytest.approx(row["compared_bytes"] / measured - 1, abs=1e-4)
    assert (abs(row["error"]) > 0.03) == bool(row["off_because"])
    if "torchtitan" in row["made_of"]:
        assert row["made_of"] == told(row["id"])
        return
    recipe = check_recipe(row["made_of"]["recipe"], row["id"])
    assert recipe.world_size == row["gpus"]
    if row["napkin_bytes"] is not None:
        memory = predict(recipe, find_hardware(GPUS[row["gpu"]])).memory
        assert row["napkin_bytes"] == memory.peak_allocated_bytes
