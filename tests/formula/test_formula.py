"""A formula says what the simulation says: at sizes that it was not derived at, to the byte, or nothing."""

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest
import torch

import harness.formula.formula
from harness.allocator import parse_settings
from harness.fit import derive
from harness.formula import Formula, in_dimensions, load, point_of, radix_sort_scratch, save, terms_at_peak
from harness.formula.expression import Factors, Point, Rule, Sum, explain
from harness.hardware import PLENTY_BYTES, find_hardware, with_memory
from harness.recipe import Recipe, recipe_yaml
from harness.simulate import simulate
from harness.step_profile import StepProfile
from harness.system import TorchRelease
from tests.support.commands import Call
from tests.support.long import but_for
from tests.support.napkin_oracle import recipe_for
from tests.support.tiny import tiny

H100 = find_hardware("h100")
PLENTY = with_memory(H100, PLENTY_BYTES)
PLAIN = parse_settings("", "2.13.0")
MIB = 2**20


def sized(recipe: Recipe, point: Point) -> Recipe:
    return recipe.model_copy(update=point._asdict())


def derived(recipe: Recipe, *points: tuple[int, int]) -> Formula:
    formula = Formula({})
    for point in points:
        profile, memory = simulate(sized(recipe, Point(*point)), PLENTY, PLAIN, explain_oom=False)
        formula.learn(memory.log, profile, memory.labels())
    return formula


@cache
def of_lora() -> Formula:
    """At the fewest points that make it sure."""
    return derived(RECIPES["lora"], (2, 1024), (12, 2048), (5, 1088))


def by_formula(formula: Formula, recipe: Recipe, hardware=PLENTY) -> StepProfile:
    piece = formula.knowing(point_of(recipe))
    assert piece is not None
    return formula.profile(recipe, hardware, PLAIN)


def numbers(profile: StepProfile) -> tuple:
    memory = profile.memory
    phases = {
        name: (stats.peak_allocated_bytes, stats.peak_reserved_bytes)
        for name, stats in profile.phases.items()
    }
    peaks = memory.setup_peak_allocated_bytes, memory.first_step_peak_allocated_bytes
    if profile.oom is not None:
        oom = profile.oom
        return oom.phase, oom.requested_bytes, oom.free_bytes, oom.reserved_unallocated_bytes
    return memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.peak_phase, phases, peaks


RECIPES = {
    "full": tiny(precision="bf16"),
    "lora": tiny(adapter="lora", precision="bf16", gradient_checkpointing=True),
    "nf4": tiny(adapter="lora", quantization="nf4", precision="bf16"),
    "eager": tiny(attention="eager", precision="bf16-mixed"),
    "offload": tiny(adapter="lora", offload=("activations",), precision="bf16"),
    "checkpoints": tiny(precision="bf16", gradient_checkpointing=True, offload=("checkpoints",)),
    "fused": tiny(adapter="lora", loss="fused_linear", precision="bf16"),
    "gpt2": tiny("gpt2", precision="fp16-mixed"),
    "experts": tiny("mixtral", precision="bf16", adapter="lora"),
}
CORNERS = {"gpt2": [(2, 64), (12, 128), (7, 64), (3, 128)]}
"""Its positions are 128."""


@pytest.mark.parametrize("name", but_for(("lora",), {n: n for n in RECIPES}))
def test_between_the_sizes_it_was_derived_at_it_is_the_simulation_to_the_byte(name: str) -> None:
    if name == "fused" and not TorchRelease.of(torch.__version__).keeps_cublas_workspaces:
        pytest.skip("since PyTorch 2.15 it makes other requests at other sizes")
    recipe = RECIPES[name]
    corners = CORNERS.get(name, [(4, 1024), (24, 4096), (9, 1088), (17, 2240)])
    formula = derived(recipe, *corners)
    rows, tokens = zip(*corners, strict=True)
    chosen = random.Random(name)
    known = 0
    for _ in range(8):
        point = Point(
            chosen.randint(min(rows), max(rows)), 64 * chosen.randint(min(tokens) // 64, max(tokens) // 64)
        )
        if formula.knowing(point) is None or known == 4:
            continue
        known += 1
        asked = sized(recipe, point)
        simulated = simulate(asked, PLENTY, PLAIN, explain_oom=False)[0]
        assert numbers(by_formula(formula, asked)) == numbers(simulated), point
    assert known == 4


def test_with_less_memory_it_runs_out_where_the_simulation_does() -> None:
    recipe = RECIPES["lora"]
    formula = of_lora()
    asked = sized(recipe, Point(7, 1536))
    peak = by_formula(formula, asked).memory.peak_reserved_bytes or 0
    outcomes = set()
    for share in (0.3, 0.7, 0.9, 0.99, 1.0):
        device = with_memory(H100, H100.calibration.cuda_context_bytes + int(peak * share))
        simulated = simulate(asked, device, PLAIN, explain_oom=False)[0]
        assert numbers(by_formula(formula, asked, device)) == numbers(simulated)
        outcomes.add(simulated.oom is None)
    assert outcomes == {True, False}


def test_it_is_not_replayed_where_enough_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device with the least memory that is enough does, one with more does; and one on which not even
    what is alive has room needs no replay either."""
    asked, context = sized(RECIPES["lora"], Point(7, 1088)), H100.calibration.cuda_context_bytes
    formula, replays = replace(of_lora(), outcomes={}), list[int]()
    replay = harness.formula.formula.outcome

    def counted(log, settings, capacity_bytes, *args):
        replays.append(capacity_bytes)
        return replay(log, settings, capacity_bytes, *args)

    monkeypatch.setattr("harness.formula.formula.outcome", counted)
    plenty = numbers(by_formula(formula, asked))
    (found,) = formula.outcomes.values()
    enough = with_memory(H100, context + found["most_used"])
    assert numbers(by_formula(formula, asked, enough)) == plenty
    assert formula.fits(asked, enough, PLAIN)
    least = formula.least_bytes(point_of(asked)) or 0
    assert not formula.fits(asked, with_memory(H100, context + least - 1), PLAIN)
    assert replays == [PLENTY_BYTES - context]
    again = replace(formula, outcomes={})
    assert numbers(by_formula(again, asked, enough)) == plenty
    assert [one["most_used"] for one in again.outcomes.values()] == [found["most_used"]]
    less = with_memory(H100, enough.memory_bytes - 1)
    assert numbers(by_formula(formula, asked, less)) == numbers(
        simulate(asked, less, PLAIN, explain_oom=False)[0]
    )
    assert len(replays) == 3
    assert formula.outcomes[[*formula.outcomes][-1]]["most_used"] is None  # it was refused some once


@pytest.mark.parametrize("text", ["expandable_segments:True", "per_process_memory_fraction:0.5"])
def test_it_is_replayed_where_the_allocator_asks_how_much_memory_there_is(text: str) -> None:
    settings, asked = parse_settings(text, "2.13.0"), sized(RECIPES["lora"], Point(7, 1088))
    formula = replace(of_lora(), outcomes={})
    for hardware in (PLENTY, H100):
        formula.profile(asked, hardware, settings)
    assert len(formula.outcomes) == 2


def test_where_the_step_is_another_it_says_nothing() -> None:
    """One row has no mask to make: its requests are others."""
    formula = of_lora()
    assert formula.knowing(Point(1, 1024)) is None  # outside
    assert formula.knowing(Point(3, 1025)) is None  # kernels pad such lengths
    assert formula.knowing(Point(3, 4096)) is None
    assert formula.knowing(Point(3, 1088)) is not None


def test_two_points_are_not_enough_to_be_sure() -> None:
    formula = derived(RECIPES["lora"], (2, 1024), (12, 2048))
    assert formula.knowing(Point(3, 1088)) is None
    assert formula.guessing(Point(3, 1088)) is not None


def test_it_is_kept_and_read_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))
    recipe = RECIPES["lora"]
    formula = replace(of_lora(), key=load(recipe, H100).key)
    save(formula)
    read = load(sized(recipe, Point(50, 8192)), H100)  # its sizes are no part of what it holds for
    assert read.pieces == formula.pieces
    assert numbers(by_formula(read, sized(recipe, Point(4, 1536)))) == numbers(
        by_formula(formula, sized(recipe, Point(4, 1536)))
    )
    assert not load(recipe.model_copy(update={"lora_rank": 4}), H100).pieces
    assert not load(recipe, find_hardware("a100-80gb")).pieces
    (file,) = (tmp_path / "formulas").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert not load(recipe, H100).pieces  # half a file is none


def test_sizes_are_explained_by_as_little_as_can_be() -> None:
    points = [Point(2, 1024), Point(3, 1088), Point(5, 1280)]
    constant, both, padded = (
        explain([f(p) for p in points], points)
        for f in (
            lambda p: 4096,
            lambda p: 8 * p.micro_batch_size + 16 * p.micro_batch_size * p.seq_len,
            lambda p: 4 * p.micro_batch_size * -(-p.seq_len // 128) * 128,
        )
    )
    assert constant == (Sum(((Fraction(4096), Factors()),)), True)
    assert (str(both[0]), both[1]) == ("8·B + 16·B·S", True)
    assert (str(padded[0]), padded[1]) == ("4·B·S↑128", True)
    assert explain([3, 17, 4], points) == (None, False)


def test_a_rule_of_a_library_is_kept_as_a_rule() -> None:
    points = [Point(2, 1024), Point(3, 1088), Point(5, 1280)]
    found, sure = explain(
        [radix_sort_scratch(p.micro_batch_size * p.seq_len * 8, 64, 4608) for p in points], points
    )
    assert isinstance(found, Rule)
    assert (str(found), sure) == ("radix_sort_scratch(8·B·S, 64, 4608)", True)
    assert found.at(Point(7, 4096)) == radix_sort_scratch(7 * 4096 * 8, 64, 4608)


def test_the_file_is_plain_json() -> None:
    formula = derived(RECIPES["full"], (4, 1024), (8, 2048), (5, 1088))
    text = json.dumps(formula.as_json())
    assert Formula.from_json(json.loads(text)).pieces == formula.pieces


def test_the_terms_at_the_peak_are_those_of_the_simulation(tmp_path) -> None:
    """Between the sizes it was derived at: each category, and all together."""
    recipe = RECIPES["lora"]
    formula = of_lora()
    asked = Point(7, 1536)
    found = terms_at_peak(formula.knowing(asked), asked)
    memory = simulate(sized(recipe, asked), PLENTY, PLAIN, explain_oom=False)[0].memory
    assert found.phase == memory.peak_phase
    by_category: Counter[str] = Counter()
    for term in found.terms:
        by_category[f"{term.category}_bytes"] += term.rounded_bytes
    # what the allocator does not split off a larger block is of no request
    not_split = memory.peak_allocated_bytes - found.total_bytes
    assert 0 <= not_split < MIB
    simulated = {name: size for name, size in memory.at_peak.model_dump().items() if size}
    assert simulated.keys() == by_category.keys()
    more = {name: size - by_category[name] for name, size in simulated.items()}
    assert min(more.values()) >= 0
    assert sum(more.values()) == not_split


def test_a_size_is_spelled_in_the_dimensions_of_the_model() -> None:
    def spelled(coefficient: int, *factors: int) -> str:
        return in_dimensions(Sum(((Fraction(coefficient), Factors(*factors)),)), {"H": 4096, "F": 14336})

    assert spelled(8192, 1, 1) == "B·S·H × 2 B"
    assert spelled(4096 * 14336 * 2) == "H·F × 2 B"
    assert spelled(4096 * 4, 1, 1) == "B·S·H × 4 B"
    assert spelled(8, 1, 1) == "B·S × 8 B"
    assert spelled(12345, 0, 1) == "12345·S"


def test_a_size_of_one_length_has_the_factors_that_tensors_of_a_step_have() -> None:
    """Those of Llama-3.2-1B at 2,048 tokens, as many as its H: by numbers alone other products would do."""
    names = {"S": 2048, "H": 2048, "F": 8192, "V": 128256, "N": 32}

    def spelled(coefficient: int, batch: int) -> str:
        return in_dimensions(Sum(((Fraction(coefficient), Factors(batch)),)), names)

    assert spelled(2048 * 2048 * 2, 1) == "B·S·H × 2 B"
    assert spelled(2048 * 8192 * 4, 1) == "B·S·F × 4 B"
    assert spelled(2048 * 2048 * 32 * 4, 1) == "B·S·S·N × 4 B"  # scores of attention, as wide as F·F × 8 B
    assert spelled(2048 * 8192 * 2, 0) == "H·F × 2 B"  # a weight: no tokens without a batch


LLAMA_1B = {"H": 2048, "F": 8192, "V": 128256, "K": 512}
LLAMA_8B = {"H": 4096, "F": 14336, "V": 128256, "K": 1024}
"""Of the models' configs. Both have 32 heads."""


@pytest.mark.parametrize(
    ("names", "rank", "numbers", "factors", "said"),
    [
        (LLAMA_8B, 16, 32 * 4, (1, 2), "B·S²·N × 4 B"),  # scores, as wide as R × 8 B
        (LLAMA_1B, 8, 32 * 4, (0, 2), "S²·N × 4 B"),  # as wide as R·R × 2 B
        (LLAMA_1B, 8, 32 * 2, (0, 2), "S²·N × 2 B"),  # as wide as R × 8 B
        (LLAMA_1B, 32, 32 * 2, (0, 2), "S²·N × 2 B"),
        (LLAMA_1B, 8, 8192 * 2, (1, 1), "B·S·F × 2 B"),  # the MLP, as wide as H × 8 B
        (LLAMA_1B, 8, 2048 * 8192 * 2, (), "H·F × 2 B"),  # its weight, as large as H·H × 8 B
        (LLAMA_1B, 8, 2048 * 2, (1, 1), "B·S·H × 2 B"),
        (LLAMA_1B, 32, 32 * 2, (1, 1), "B·S·R × 2 B"),  # what the adapter's first half makes
        (LLAMA_8B, 16, 14336 * 16 * 4, (), "F·R × 4 B"),
        (LLAMA_8B, 2, 8, (1, 1), "B·S × 8 B"),  # tokens
        (LLAMA_8B, 2, 2, (1, 2), "B·S² × 2 B"),  # a mask
    ],
)
def test_numbers_have_two_or_four_bytes_and_scores_have_heads(
    names: dict[str, int], rank: int, numbers: int, factors: tuple[int, ...], said: str
) -> None:
    size = Sum(((Fraction(numbers), Factors(*factors)),))
    assert in_dimensions(size, {**names, "R": rank, "N": 32}) == said


@pytest.mark.parametrize(
    ("numbers", "sequence", "said"),
    [(2 * 128256 * 4, 1, "B·S·V × 4 B"), (2 * 32 * 4, 2, "B·S²·N × 4 B"), (8192 * 2048 * 2, 0, "H·F × 2 B")],
)
def test_a_size_of_one_micro_batch_of_two_rows_has_them(numbers: int, sequence: int, said: str) -> None:
    size = Sum(((Fraction(numbers), Factors(0, sequence)),))
    assert in_dimensions(size, {"B": 2, **LLAMA_1B, "N": 32}) == said


@pytest.mark.parametrize("rows", [1, 4])
def test_a_model_at_its_longest_sequence_has_a_formula_of_shorter_ones(tmp_path: Path, rows: int) -> None:
    """GPT-2 knows no more positions than its config has."""
    longest = {"n_positions": 256}
    recipe = recipe_for(tmp_path, "gpt2", config=longest, micro_batch_size=rows, seq_len=256)
    found = derive(recipe, H100)
    assert found.exact
    assert found.piece.knows(Point(rows + (rows > 1), 192))


def test_the_command_says_where_it_holds(call: Call, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(recipe_yaml(RECIPES["lora"]))
    text = call("formula", "tiny.yaml", "micro_batch_size=4", "seq_len=64")[1]
    assert "what is allocated at the peak" in text
    assert "Exact for B from 4 to 16 and S from 64 to 256 in steps of 64" in text
    assert "N = " not in text  # nothing at the peak has heads
    scores = call("formula", "tiny.yaml", "attention=eager", "gradient_checkpointing=false", "seq_len=64")[1]
    assert "S²·N × 4 B" in scores
    assert ", N = 4\n" in scores
    document = json.loads(call("formula", "tiny.yaml", "--json")[1])
    assert document["exact"]
    total = sum(term["rounded_bytes"] for term in document["terms"])
    assert total == document["peak_allocated_bytes"]
