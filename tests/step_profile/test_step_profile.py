"""profile.json from anyone: what no run can have is refused, and the field named. And the three verdicts:
fits, does not, and too tight to call for what nobody counts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.file import load_recipe
from harness.step_profile import RanksReport, StepProfile, verdict
from harness.step_profile.in_words import ranks_in_words
from harness.step_profile.step_profile import (
    MAX_DETAILS,
    MAX_FILE_BYTES,
    RankStats,
)
from harness.step_profile.times import utilization
from tests.support.trust_report import Tried

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def document() -> dict[str, Any]:
    return json.loads(predict(load_recipe("smoke")[1], find_hardware("h100")).to_json())


def test_utilization_by_hand() -> None:
    """60 TFLOP in 2 s of a device that does 100 in one."""
    assert utilization(60 * 10**12, 2.0, 100e12) == 0.3
    assert utilization(None, 2.0, 100e12) is utilization(6, None, 1.0) is utilization(6, 2.0, None) is None


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


IMPOSSIBLE: dict[str, tuple[Change, str]] = {
    "a negative peak": (lambda d: d["memory"].update(peak_allocated_bytes=-1), "peak_allocated_bytes"),
    "a negative part of the peak": (lambda d: d["memory"]["at_peak"].update(inputs_bytes=-1), "inputs_bytes"),
    "true for bytes": (lambda d: d["memory"].update(peak_reserved_bytes=True), "peak_reserved_bytes"),
    "text for bytes": (lambda d: d["memory"].update(process_bytes="1024"), "process_bytes"),
    "half a byte": (lambda d: d["memory"].update(host_bytes=0.5), "host_bytes"),
    "an integer of 4,000 digits": (lambda d: d["memory"].update(host_bytes=10**4000), "128 bits"),
    "a nan time": (lambda d: d["step"]["time_s"].update(median=float("nan")), "NaN is no number"),
    "an infinite time": (lambda d: d["step"]["time_s"].update(p90=float("inf")), "Infinity is no number"),
    "a negative time": (lambda d: d["phases"]["forward"]["time_s"].update(p10=-0.1), "time_s.p10"),
    "true for a time": (lambda d: d["step"]["time_s"].update(median=True), "time_s.median"),
    "a negative count": (lambda d: d["step"]["time_s"].update(n=-1), "time_s.n"),
    "a negative share": (lambda d: d["step"].update(mfu=-0.5), "step.mfu"),
    "true for the version": (lambda d: d.update(schema_version=True), "schema_version True"),
    "a version as a float": (lambda d: d.update(schema_version=1.0), "schema_version 1.0"),
    "text for complete": (lambda d: d.update(complete="yes"), "complete"),
    "many module names": (
        lambda d: d["memory"].update(at_peak_by_module=dict.fromkeys(map(str, range(200_000)), 1)),
        "at_peak_by_module",
    ),
    "a long module name": (lambda d: d["memory"].update(at_peak_by_module={"a." * 1000: 1}), "at_peak_by"),
    "many phases": (lambda d: d.update(phases={str(n): {} for n in range(1000)}), "phases"),
    "many fields": (lambda d: d["recipe"].update(dict.fromkeys(map(str, range(200_000)))), "field recipe"),
    "many values": (lambda d: d["provenance"].update(a={"b": [0] * MAX_DETAILS}), "field provenance"),
    "deep values": (lambda d: d["provenance"].update(a=nested(200)), "nested deeper"),
    "many warnings": (lambda d: d.update(warnings=["a"] * 100_000), "warnings"),
    "many allocations": (
        lambda d: d.update(top=[{"size_bytes": 1, "category": "inputs"}] * 100_000),
        "field top",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_run_can_have_is_refused(
    name: str, document: dict[str, Any], tmp_path: Path, tried: Tried
) -> None:
    change, said = IMPOSSIBLE[name]
    change(document)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=said) as caught:
        StepProfile.read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400
    tried(
        "Hostile profiles",
        "negative bytes and times, nan, true for a number, integers of 4,000 digits, 200,000 names, deep "
        "values",
        "exit 2, the field named",
    )


def test_a_key_that_is_repeated_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="'source' is given twice"):
        StepProfile.from_json(json.dumps(document)[:-1] + ', "source": "measured"}')


def test_a_file_of_any_size_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with open(path, "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="16,777,217 bytes"):
        StepProfile.read(path)


def test_a_long_run_has_a_loss_a_step(document: dict[str, Any]) -> None:
    document["step"]["loss"] = [2.5, None] * 250_000
    assert len(StepProfile.from_json(json.dumps(document)).step.loss or ()) == 500_000


def test_a_profile_is_called_by_its_model_or_by_its_command(document: dict[str, Any]) -> None:
    """A command's program may lie deep in an environment's folder, which says nothing."""
    assert StepProfile.model_validate(document).subject == document["recipe"]["model"]
    watched = document | {
        "recipe": None,
        "command": ["/opt/env/bin/python", "/data/train.py", "--steps", "3"],
    }
    assert StepProfile.model_validate(watched).subject == "python /data/train.py --steps 3"


def test_who_waits_in_backward_is_not_called_late() -> None:
    """Who is late in forward comes last into the exchange of gradients: there the others wait for it."""
    times = ({"forward": 0.005, "backward": 0.115}, {"forward": 0.021, "backward": 0.041})
    ranks = [RankStats(rank=rank, phases_s=phases) for rank, phases in enumerate(times)]
    forward, backward = ranks_in_words(RanksReport(world_size=2, peak_rank=0, ranks=ranks))
    assert forward == "forward: rank 1 takes longest, 21.0 ms; the median of all is 13.0 ms."
    assert backward.startswith("backward: rank 0 takes longest")
    assert backward.endswith("Ranks that exchange gradients wait there: it came first.")


GIB = 2**30
DEVICE = 20 * GIB
SHARDED = {"parallel": "fsdp", "dp_shard": 8, "dp_replicate": 1, "tp": 1}
HYBRID = SHARDED | {"dp_replicate": 2}


def profile(spare: float, **recipe: Any) -> StepProfile:
    """Of a device with 20 GiB, of which so many GiB are to spare."""
    found = predict(load_recipe("smoke")[1], find_hardware("h100"))
    found.source, found.hardware.memory_bytes = "simulated", DEVICE
    found.memory.process_bytes = DEVICE - round(spare * GIB)
    found.recipe = (found.recipe or {}) | recipe
    return found


@pytest.mark.parametrize(
    ("spare", "recipe", "said"),
    [
        (0.41, {}, "fits"),  # 2 % of 20 GiB are 0.4
        (0.39, {}, "too tight to call"),
        (0.0, {}, "too tight to call"),
        (-0.01, {}, "does not fit"),
        (1.50, SHARDED, "fits"),  # 1.6e9 bytes are 1.490 GiB
        (1.48, SHARDED, "too tight to call"),
        (-0.01, SHARDED, "does not fit"),
        (2.97, HYBRID, "too tight to call"),  # a communicator within a group, and one across
        (2.99, HYBRID, "fits"),
        (0.41, SHARDED | {"dp_shard": 1}, "fits"),  # a rank alone has none
    ],
)
def test_the_verdict_by_hand(spare: float, recipe: dict[str, Any], said: str) -> None:
    assert verdict(profile(spare, **recipe)).startswith(f"{said} in the 20.00 GiB of h100")


def test_what_is_not_counted_is_named() -> None:
    """544 MB are 0.507 GiB."""
    alone = verdict(profile(0.25))
    assert "0.25 GiB to spare" in alone
    assert alone.endswith("not counted: what CUDA's libraries load, ECC where it takes memory, a display")
    ranks = verdict(profile(0.25, **SHARDED))
    assert "not counted: NCCL's buffers (0.51 GiB to 1.49 GiB), what CUDA" in ranks
    ranks = verdict(profile(4, **HYBRID))
    assert ranks.endswith("to spare, NCCL's buffers (1.01 GiB to 2.98 GiB for 2 communicators) not counted")


def test_a_loop_that_is_not_ours_on_several_ranks_has_a_communicator() -> None:
    watched = profile(1)
    watched.recipe = None
    assert verdict(watched).startswith("fits")
    ended_early = watched.model_copy(update={"complete": False})
    assert verdict(ended_early).startswith("as far as it came, it fits")
    watched.ranks = RanksReport(world_size=2, peak_rank=0)
    assert verdict(watched).startswith("too tight to call")


def test_what_was_measured_has_shown_that_it_fits() -> None:
    measured = profile(0.01, **SHARDED)
    measured.source = "measured"
    assert verdict(measured).startswith("fits in the 20.00 GiB of h100 with ")
    assert "NCCL" not in verdict(measured)
