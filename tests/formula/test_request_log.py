"""A step's requests, made again: until it leaves the blocks that it found."""

from fractions import Fraction

import pytest

from harness.allocator import Allocator, Block, Settings
from harness.formula import Factors, Piece, Point, Sum
from harness.formula.request_log import RequestLog

MIB = 1 << 20


def logged(*events: tuple[int, int]) -> tuple[RequestLog, Allocator, dict[int, Block]]:
    """After block 0, of 3 MiB: (key, bytes) is born and (key, -1) dies."""
    allocator = Allocator(Settings(), None, None)
    blocks = {0: allocator.malloc(3 * MIB)}
    log = RequestLog()
    log.born(0, 3 * MIB)
    log.mark("recorded")
    log.mark("phase", "forward")
    for key, size_bytes in events:
        if size_bytes < 0:
            log.died(key)
            allocator.free(blocks.pop(key))
        else:
            log.born(key, size_bytes)
            blocks[key] = allocator.malloc(size_bytes)
    return log, allocator, blocks


def test_a_step_that_replaces_what_it_found_is_steady() -> None:
    log, _, _ = logged((1, 3 * MIB), (0, -1), (2, 512), (2, -1))
    assert log.steady() == {0: 1}


def test_a_step_that_leaves_more_than_it_found_is_not() -> None:
    log, allocator, blocks = logged((1, 3 * MIB), (0, -1), (2, 512))
    assert log.steady() is None
    assert log.repeat(3, allocator, blocks, lambda _: None) == {}


def test_it_is_repeated_until_a_step_leaves_blocks_that_one_left_before() -> None:
    """What dies within the step leaves nothing. What replaces another is now in one half of 6 MiB, now in the
    other: two steps end as they began.
    """
    for events, times in (([(1, 512), (1, -1)], 1), ([(1, 3 * MIB), (0, -1)], 2)):
        log, allocator, blocks = logged(*events)
        entered: list[str] = []
        peaks = log.repeat(10, allocator, blocks, entered.append)
        allocated = 3 * MIB + events[0][1]
        assert peaks == {"forward": (allocated, 20 * MIB + (2 * MIB if times == 1 else 0))}
        assert entered == ["forward"] * times
        assert len(blocks) == 1


def test_each_repeated_step_loses_what_the_step_lost() -> None:
    log, allocator, blocks = logged((1, 3 * MIB), (0, -1), (2, 3 * MIB))
    log.lost = log.born_in_the_step([2, 77])
    peaks = log.repeat(3, allocator, blocks, lambda _: None)
    assert peaks["forward"][0] == (3 + 3 * 3 + 3) * MIB
    assert sum(block.size for block in blocks.values()) == (3 + 4 * 3) * MIB


def test_what_lies_between_phases_is_of_no_phase() -> None:
    log, allocator, blocks = logged((1, 512), (1, -1))
    log.mark("between")
    log.born(2, 5 * MIB)
    log.died(2)
    entered: list[str] = []
    assert log.repeat(1, allocator, blocks, entered.append)["forward"][0] == 3 * MIB + 512
    assert entered == ["forward"]


def test_where_an_expression_comes_to_nothing_the_formula_does_not_hold():
    """Nobody asks an allocator for 0 bytes: such a size was seen too far away."""

    log = RequestLog()
    log.mark("recorded")
    log.born(0, 2 * (4096 - 64))
    seen = Piece.of(log, Point(1, 4096))
    seen.columns = [Sum(((Fraction(2), Factors(sequence=1)), (Fraction(-128), Factors())))]
    assert seen.sizes_at(Point(1, 2048)) == [2 * (2048 - 64)]
    for tokens in (64, 32):
        with pytest.raises(ValueError, match="allocation of"):
            seen.at(Point(1, tokens))
