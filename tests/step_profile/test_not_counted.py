"""The three verdicts: fits, does not, and too tight to call for what nobody counts."""

from typing import Any

import pytest

from harness.hardware.hardware import find_hardware
from harness.napkin.prediction import predict
from harness.recipe.file import load_recipe
from harness.step_profile import RanksReport, StepProfile, verdict

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
    watched.ranks = RanksReport(world_size=2, peak_rank=0)
    assert verdict(watched).startswith("too tight to call")


def test_what_was_measured_has_shown_that_it_fits() -> None:
    measured = profile(0.01, **SHARDED)
    measured.source = "measured"
    assert verdict(measured).startswith("fits in the 20.00 GiB of h100 with ")
    assert "NCCL" not in verdict(measured)
