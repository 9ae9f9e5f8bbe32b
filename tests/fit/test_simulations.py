"""Two searches side by side know together what each of them would have learned alone."""

import pytest

from harness.errors import InputError
from harness.fit.simulations import Simulations, all_at_once, both_at_once
from harness.formula import Point
from harness.hardware.hardware import find_hardware
from harness.recipe import Recipe
from tests.support.tiny import tiny

H100 = find_hardware("h100")


def at(rows: int, tokens: int) -> Recipe:
    return tiny(micro_batch_size=rows, seq_len=tokens)


def searched(simulations: Simulations, *sizes: tuple[int, int]) -> int:
    """What was simulated last takes at its peak."""
    profiles = [simulations.profile(at(*size)) for size in sizes]
    return profiles[-1].memory.peak_allocated_bytes or 0


def test_what_the_other_process_learned_is_known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.fit.simulations._may_fork", lambda: True)
    simulations = Simulations(H100)
    rows, tokens = both_at_once(
        simulations,
        lambda: searched(simulations, (2, 64), (4, 64)),
        lambda: searched(simulations, (2, 64), (2, 256)),
    )
    formula = simulations.formula(at(2, 64))
    assert set(formula.simulated_at()) == {Point(2, 64), Point(4, 64), Point(2, 256)}
    alone = Simulations(H100)
    assert (rows, tokens) == (searched(alone, (4, 64)), searched(alone, (2, 256)))


def test_what_the_other_process_raises_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.fit.simulations._may_fork", lambda: True)

    def refused() -> int:
        raise InputError("seq_len: too long")

    with pytest.raises(InputError, match="seq_len: too long"):
        both_at_once(Simulations(H100), lambda: 1, refused)
    with pytest.raises(InputError, match="seq_len: too long"):
        both_at_once(Simulations(H100), refused, lambda: 1)


def test_a_guess_is_forgotten_where_more_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept of an outcome at sizes that another piece speaks of now."""
    simulations = Simulations(H100)
    searched(simulations, (2, 64), (4, 64))
    guessed = simulations.expected(at(8, 64))
    assert guessed is not None
    searched(simulations, (8, 64))
    found = simulations.profile(at(8, 64))
    fresh = Simulations(H100)
    searched(fresh, (8, 64))
    assert found.memory == fresh.profile(at(8, 64)).memory


def test_no_process_writes_over_what_another_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sizes of one recipe and one of another, on two cores: all are known afterwards."""
    monkeypatch.setattr("harness.fit.simulations._may_fork", lambda: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    wanted = [at(3, 32), at(5, 32), at(7, 32), tiny(micro_batch_size=3, seq_len=32, attention="eager")]
    all_at_once((Simulations(H100), recipe) for recipe in wanted)
    known = Simulations(H100)
    assert [known.is_timed(recipe) for recipe in wanted] == [True] * 4
