"""What is learned of few layers is what all of them do, or is not used; and two searches side by side know
together what each of them would have learned alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.allocator import parse_settings
from harness.errors import InputError
from harness.fit import compare_hardware, derive, fit_confirmed, fit_exact, simulations
from harness.fit.few_layers import FewLayers
from harness.fit.simulations import Simulations, all_at_once, both_at_once
from harness.formula import NotRepeated, Point, RepeatedLayers, point_of
from harness.hardware import find_hardware, with_memory
from harness.recipe import Recipe
from harness.simulate import simulate
from tests.support.long import long
from tests.support.places import MODELS
from tests.support.tiny import tiny

H100 = find_hardware("h100")
PLAIN = parse_settings("", "2.13.0")
LAYERS = 18
MIB = 2**20


def deep(folder: Path, config: dict[str, Any] | None = None, **fields: Any) -> Recipe:
    content = json.loads((MODELS / "llama.json").read_bytes()) | {"num_hidden_layers": LAYERS}
    path = folder / "deep.json"
    path.write_text(json.dumps(content | (config or {})))
    return tiny(**{"precision": "bf16", **fields}).model_copy(update={"model": str(path)})


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


OFFLOADED = {"max_grad_norm": 1.0, "offload": ["activations"]}


@pytest.mark.parametrize("fields", [{}, pytest.param(OFFLOADED, marks=long)], ids=str)
@pytest.mark.parametrize("device", ["h100", pytest.param("v100-32gb", marks=long)])
def test_memory_and_time_are_those_of_all_layers(tmp_path: Path, device: str, fields: dict[str, Any]) -> None:
    """Kernel by kernel where nothing is known of the L2 cache. On an H100 more of few layers stays in it than
    of all, and the step takes nearly as long."""
    hardware = find_hardware(device)
    recipe = deep(tmp_path, precision="bf16" if device == "h100" else "fp32", **fields)
    few, all_layers = Simulations(hardware, few_layers=True), Simulations(hardware)
    by_few = few.timed(recipe)
    piece = few.formula(recipe).knowing(point_of(recipe))
    assert piece is not None
    assert piece.whole == []
    whole = all_layers.timed(recipe)
    assert by_few.phases.keys() == whole.phases.keys()
    for name, stats in whole.phases.items():
        assert by_few.phases[name].peak_allocated_bytes == stats.peak_allocated_bytes
        assert by_few.phases[name].peak_reserved_bytes == stats.peak_reserved_bytes
        if device != "h100":
            assert by_few.phases[name].kernels_s == pytest.approx(stats.kernels_s, rel=1e-6)
    assert by_few.memory.host_bytes == whole.memory.host_bytes
    expected = whole.step.model_dump(exclude={"time_s"}, exclude_none=True)
    assert by_few.step.model_dump(exclude={"time_s"}, exclude_none=True) == pytest.approx(expected, rel=1e-3)
    assert by_few.step.time_s.median == pytest.approx(whole.step.time_s.median, rel=1e-3)
    few.confirm(recipe)
    assert piece.whole == [point_of(recipe)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes at which all layers were simulated."""
    monkeypatch.setattr(simulations, "_may_fork", lambda: False)
    found: list[tuple[int, int]] = []
    whole = Simulations.simulated

    def simulated(self: Simulations, recipe: Recipe) -> None:
        found.append(point_of(recipe))
        whole(self, recipe)

    monkeypatch.setattr(Simulations, "simulated", simulated)
    return found


SMALL = with_memory(H100, 918 * MIB)


def test_a_search_finds_the_same_and_has_seen_it_with_all_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[int, int]]
) -> None:
    recipe = deep(tmp_path, optimizer="sgd")
    found = fit_exact(recipe, Simulations(SMALL, PLAIN, few_layers=True))
    assert asked == [(found.value, 16)]
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    whole = fit_exact(recipe, Simulations(SMALL, PLAIN))
    assert len(asked) > 3
    assert whole.as_json() == found.as_json()


@pytest.fixture
def _wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is derived from few layers has one layer less than the model."""
    right = RepeatedLayers.at
    monkeypatch.setattr(RepeatedLayers, "at", lambda self, n, *logs: right(self, n - (n > 2), *logs))


@long
@pytest.mark.usefixtures("_wrong")
def test_few_layers_that_were_wrong_are_not_believed(tmp_path: Path, asked: list[tuple[int, int]]) -> None:
    recipe = deep(tmp_path, optimizer="sgd", micro_batch_size=400)
    found = fit_confirmed(recipe, SMALL, PLAIN).largest["micro_batch_size"].value
    assert found == fit_exact(recipe, Simulations(SMALL, PLAIN)).value
    assert len(asked) > 2


@long
@pytest.mark.usefixtures("_wrong")
def test_the_best_of_a_device_is_that_of_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: [H100])
    recipe = deep(tmp_path, seq_len=2**13, micro_batch_size=1)
    (offer,) = compare_hardware(recipe, {}, best=True)
    whole = simulate(recipe.model_copy(update={"micro_batch_size": offer.micro_batch_size}), H100)[0]
    assert offer.overrides == ""
    assert offer.required_bytes == whole.memory.process_bytes
    assert offer.tokens_per_s == pytest.approx(whole.step.tokens_per_s)


@long
@pytest.mark.usefixtures("_wrong")
def test_the_formula_is_that_of_all_layers(tmp_path: Path) -> None:
    recipe = deep(tmp_path)
    found, whole = derive(recipe, H100), simulate(recipe, H100)[0]
    assert found.exact
    assert found.terms.total_bytes == whole.memory.peak_allocated_bytes


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"num_hidden_layers": 8}, {}),
        ({"layer_types": ["full_attention"] * 17 + ["sliding_attention"]}, {}),
        ({"num_hidden_layers": "x"}, {}),
        ({}, {"parallel": "ddp", "dp_replicate": 2}),
    ],
    ids=["few anyway", "the last is another", "no number", "DDP"],
)
def test_a_model_whose_layers_do_not_repeat_is_simulated_whole(
    tmp_path: Path, config: dict[str, Any], fields: dict[str, Any]
) -> None:
    recipe = deep(tmp_path, config, **fields)
    assert FewLayers([H100], PLAIN).simulated(recipe, timed=False) is None


def test_no_process_leaves_a_folder_or_deletes_another_s(tmp_path: Path, monkeypatch) -> None:
    """Of configs that were cut, named by their number of layers."""
    monkeypatch.setattr(simulations, "_may_fork", lambda: True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "folders"))
    (tmp_path / "folders").mkdir()
    recipe = deep(tmp_path)
    other, longer = (recipe.model_copy(update=more) for more in ({"attention": "eager"}, {"seq_len": 256}))

    def folders() -> set[Path]:
        return {path.parent for path in (tmp_path / "folders").glob("*/[0-9]*.json")}

    few = Simulations(H100, few_layers=True)
    simulations.both_at_once(few, lambda: few.profile(recipe), lambda: few.profile(other))
    assert len(folders()) == 1  # this process's, which goes on with it
    simulations.both_at_once(few, lambda: few.knows(recipe), lambda: few.profile(longer))
    assert len(folders()) == 1


def test_a_question_about_all_layers_forgets_few(tmp_path: Path) -> None:
    recipe = deep(tmp_path)
    few = Simulations(H100, few_layers=True)
    few.profile(recipe)
    few.keep()
    assert Simulations(H100, few_layers=True).knows(recipe)
    assert not Simulations(H100).knows(recipe)


def test_all_layers_that_do_something_else_are_believed(tmp_path: Path) -> None:
    recipe = deep(tmp_path)
    few = Simulations(H100, few_layers=True)
    few.profile(recipe)
    piece = few.formula(recipe).pieces[0]
    piece.events = [*piece.events, 0]
    with pytest.raises(NotRepeated):
        few.confirm(recipe)
    assert piece not in few.formula(recipe).pieces


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
