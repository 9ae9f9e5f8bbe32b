"""An out-of-memory explained: sizes by hand, the remedy that fits, the moment when it happened."""

from typing import Any

import pytest

from harness.snapshot import OutOfMemory, oom_in_words, recording_of, remedy

MIB = 2**20
BASE = 0x7F00_0000_0000


def alloc(offset: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": BASE + offset * MIB, "size": size * MIB, "stream": 0, "frames": []}


def free(offset: int, size: int) -> list[dict[str, Any]]:
    return [alloc(offset, size) | {"action": action} for action in ("free_requested", "free_completed")]


def oom(requested: int, left: int) -> dict[str, Any]:
    return {"action": "oom", "device_free": left * MIB, "size": requested * MIB, "stream": 0, "frames": []}


def checkerboard(requested: int, left: int, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Four blocks of 30 MiB in a segment of 120, two of them freed; the request; then the end, all free."""
    segment_alloc = {"action": "segment_alloc", "addr": BASE, "size": 120 * MIB, "stream": 0, "frames": []}
    blocks = [alloc(30 * i, 30) for i in range(4)]
    trace = [
        segment_alloc,
        *blocks,
        *free(30, 30),
        *free(90, 30),
        oom(requested, left),
        *free(0, 30),
        *free(60, 30),
    ]
    segment = {
        "device": 0,
        "address": BASE,
        "total_size": 120 * MIB,
        "segment_type": "large",
        "blocks": [{"size": 120 * MIB, "state": "inactive", "requested_size": 0, "frames": []}],
    }
    return {"segments": [segment], "device_traces": [trace], "allocator_settings": settings or {}}


def explained(snapshot: dict[str, Any]) -> OutOfMemory:
    found = recording_of(snapshot).oom
    assert found is not None
    return found


def test_the_moment_and_not_the_end_is_told() -> None:
    """What the failing program freed afterwards was held when memory ran out."""
    found = explained(checkerboard(50, 10))
    assert found.requested_bytes == 50 * MIB
    assert found.device_free_bytes == 10 * MIB
    assert found.reserved_bytes == 120 * MIB
    assert found.allocated_bytes == 60 * MIB
    assert found.free_in_segments_bytes == found.in_pieces_bytes == 60 * MIB
    assert found.largest_piece_bytes == 30 * MIB
    first, second = oom_in_words(found)
    assert first == "Memory ran out: 50.0 MiB were asked for, and the device had 10.0 MiB left."
    assert (
        "60.0 MiB of it allocated and 60.0 MiB free; the largest free piece for such a request was 30.0"
        in second
    )


@pytest.mark.parametrize(
    ("requested", "left", "settings", "says"),
    [
        (
            50,
            10,
            {},
            "70.0 MiB were free in all, enough if they were in one piece: set PYTORCH_CUDA_ALLOC_CONF=",
        ),
        (50, 10, {"expandable_segments": True}, "although expandable_segments is on"),
        (
            50,
            10,
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "although expandable_segments is on",
        ),
        (90, 10, {}, "20.0 MiB were missing even with every free piece joined"),
        (50, 60, {}, "The device had room: a limit of the process"),
        # 3 MiB are asked for in a segment of 20, for which the device has no room: no limit of the process
        (3, 19, {}, "enough if they were in one piece"),
    ],
)
def test_the_remedy_fits_the_state(requested: int, left: int, settings: dict[str, Any], says: str) -> None:
    assert says in remedy(explained(checkerboard(requested, left, settings)))


def test_a_small_segment_s_pieces_serve_no_large_request() -> None:
    snapshot = checkerboard(50, 10)
    small = {"address": BASE + 512 * MIB, "total_size": 2 * MIB, "blocks": []}
    snapshot["segments"].append(small)
    found = explained(snapshot)
    assert found.reserved_bytes == 122 * MIB
    assert found.free_in_segments_bytes == 62 * MIB
    assert found.in_pieces_bytes == 60 * MIB


def test_several_are_counted_and_the_last_is_told() -> None:
    snapshot = checkerboard(50, 10)
    snapshot["device_traces"][0].insert(1, oom(1000, 5))
    found = explained(snapshot)
    assert (found.times, found.requested_bytes) == (2, 50 * MIB)
    assert "for the last of 2 times" in oom_in_words(found)[0]


def test_none_is_none() -> None:
    snapshot = checkerboard(50, 10)
    snapshot["device_traces"][0] = [e for e in snapshot["device_traces"][0] if e["action"] != "oom"]
    assert recording_of(snapshot).oom is None
