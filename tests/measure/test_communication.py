"""Waiting for other ranks, from the profiler's events."""

import pytest

from harness.measure.communication import PHASE, waiting


def test_waiting_is_what_no_operator_covers_by_hand() -> None:
    events = [
        (PHASE + "forward", (0, 100)),
        (PHASE + "backward", (100, 200)),
        ("FSDP::all_gather", (5, 60)),  # it waits, too
        ("gloo:all_gather", (10, 50)),
        ("aten::mm", (40, 60)),  # covers 10 of 40
        ("aten::t", (41, 42)),  # within another one
        ("gloo:all_reduce", (90, 120)),  # 10 in forward, 20 in backward
        ("gloo:all_reduce", (110, 130)),  # both at once: counted once
        ("aten::add", (125, 150)),
        ("_c10d_functional::wait_tensor", (126, 129)),  # which add called
        ("gloo:all_reduce", (300, 400)),  # in no phase
    ]
    assert waiting(events) == {"forward": 30 + 10, "backward": 20 + 5 + 3}


@pytest.mark.parametrize("operator", [(0, 100), (10, 50)])
def test_communication_that_operators_cover_is_not_waited_for(operator: tuple[int, int]) -> None:
    events = [(PHASE + "backward", (0, 100)), ("gloo:all_reduce", (10, 50)), ("aten::mm", operator)]
    assert waiting(events) == {"backward": 0}


def test_a_rank_alone_waits_for_nobody() -> None:
    assert waiting([(PHASE + "forward", (0, 9)), ("aten::mm", (1, 8))]) == {"forward": 0}
    assert waiting([]) == {}
