"""What `fit` prints has been seen to fit, and the next size has been seen not to."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import Mock

import pytest

from harness.allocator.settings import Settings, parse_settings
from harness.errors import InputError
from harness.fit import (
    ConfirmedFit,
    Simulations,
    compare_hardware,
    exact_lines,
    fit_confirmed,
    fit_document,
    fit_exact,
    fit_lines,
    render_choice,
)
from harness.fit.exact import ExactFit
from harness.fit.held_back import held_back
from harness.fit.search import MULTIPLES, FitField, fit
from harness.fit.simulations import simulations_on
from harness.formula.formula import outcome_of
from harness.hardware.hardware import Hardware, find_hardware, with_memory
from harness.recipe import Recipe, check_recipe
from harness.simulate.simulated_run import simulate
from harness.system.strict_yaml import parse_yaml
from tests.support.long import long
from tests.support.releases import keeps_workspaces
from tests.support.tiny import resized, tiny

MiB = 2**20
A100 = find_hardware("a100-40gb")  # small cuBLAS workspaces, and flash attention in 16 bit
LORA = tiny(adapter="lora", precision="bf16", micro_batch_size=1, seq_len=1024)
PLAIN, EXPANDABLE = parse_settings(""), parse_settings("expandable_segments:True")
FIELDS = list(MULTIPLES)
SIZES = (100, 140)
"""MiB in which a release of PyTorch loses so much in pieces that expandable segments allow more: until 2.14
the first, since 2.15 the second."""


def with_mib(mib: int) -> Hardware:
    """An A100 that has so much memory beside the CUDA context."""
    return with_memory(A100, A100.calibration.cuda_context_bytes + mib * MiB)


def fits(recipe: Recipe, hardware: Hardware, settings: Settings = PLAIN) -> bool:
    return simulate(recipe, hardware, settings, explain_oom=False)[0].oom is None


@cache
def found_in(mib: int) -> ExactFit:
    return fit_exact(LORA, Simulations(with_mib(mib)))


@cache
def confirmed(mib: int) -> ConfirmedFit:
    return fit_confirmed(LORA, with_mib(mib), PLAIN)


def test_what_was_answered_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes and other settings of the allocator too, which are seen after the sizes."""
    monkeypatch.setattr("harness.fit.simulations._may_fork", lambda: False)  # a call there would not be seen
    monkeypatch.setattr("harness.formula.formula.outcome_of", played := Mock(wraps=outcome_of))
    heavy, device = LORA.model_copy(update={"micro_batch_size": 8}), with_mib(61)
    first = fit_confirmed(heavy, device, PLAIN)
    assert [change for change in first.changes if change.seen]
    assert played.called
    played.reset_mock()
    again = fit_confirmed(heavy, device, PLAIN)
    lines = [[*fit_lines("", "", heavy, device, found)] for found in (first, again)]
    assert lines[0] == lines[1]
    assert not played.called


@pytest.mark.parametrize("field", FIELDS)
def test_the_answer_fits_and_the_next_size_does_not(field: FitField) -> None:
    exact = confirmed(100).largest[field]
    assert exact.value is not None
    assert exact.next_value == exact.value + exact.multiple_of
    assert fits(LORA.model_copy(update={field: exact.value}), with_mib(100))
    assert not fits(LORA.model_copy(update={field: exact.next_value}), with_mib(100))
    assert len(exact.tried) < 12
    assert exact.value % exact.multiple_of == 0
    assert (exact.tried[exact.value], exact.tried[exact.next_value]) == (True, False)
    assert exact.profile is not None
    assert exact.profile.recipe[field] == exact.value
    assert (exact.profile.memory.peak_reserved_bytes or 0) <= 100 * MiB
    assert exact.next_profile is not None
    assert exact.next_profile.oom is not None


@pytest.mark.parametrize("field", FIELDS)
def test_what_expandable_segments_allow_was_seen_and_is_more(field: FitField) -> None:
    seen = 0
    for mib in SIZES:
        found = confirmed(mib)
        if field in found.expandable:
            larger = found.expandable[field].value
            assert larger is not None
            assert larger > (found.largest[field].value or 0)
            changed = LORA.model_copy(update={field: larger})
            assert fits(changed, with_mib(mib), EXPANDABLE)
            assert not fits(changed, with_mib(mib))
            text = "\n".join(fit_lines("lora", "an A100", LORA, with_mib(mib), found))
            assert f"with PYTORCH_ALLOC_CONF=expandable_segments:True even {larger} fits" in text
            seen += 1
    assert seen


def test_a_larger_size_is_hoped_for_only_where_its_tensors_have_room() -> None:
    mib = next(mib for mib in SIZES if "micro_batch_size" in confirmed(mib).expandable)
    found = found_in(mib)
    assert found.next_profile is not None
    assert found.next_profile.oom is not None
    assert found.profile is not None
    assert found.profile.memory.peak_allocated_bytes is not None
    pieces = found.next_profile.oom.reserved_unallocated_bytes or 0
    assert pieces >= (found.next_profile.oom.requested_bytes or 0)
    left = mib * MiB - found.profile.memory.peak_allocated_bytes
    for more, hope in ((left, True), (left + 1, False), (None, False)):
        text = "\n".join(exact_lines("", "", LORA, replace(found, one_more_bytes=more)))
        assert "lay free in smaller pieces" in text
        assert ("may by chance" in text) is hope


def test_who_has_expandable_segments_is_not_told_of_them() -> None:
    mib = next(mib for mib in SIZES if "seq_len" in confirmed(mib).expandable)
    found = fit_confirmed(LORA, with_mib(mib), EXPANDABLE)
    assert found.expandable == {}
    assert found.largest["seq_len"].value >= confirmed(mib).expandable["seq_len"].value


def test_a_recipe_that_does_not_fit_gets_changes_that_were_seen_to() -> None:
    heavy = LORA.model_copy(update={"micro_batch_size": 8})
    told: list[str] = []
    found = fit_confirmed(heavy, with_mib(60), PLAIN, told=told.append)
    assert found.largest["micro_batch_size"].value < 8
    assert any(change.seen and change.fits for change in found.changes)
    now = simulate(heavy, with_mib(600), PLAIN)[0]
    for change in found.changes:
        if change.seen:
            changed = check_recipe({**heavy.model_dump(), **change.fields}, "test")
            assert fits(changed, with_mib(60)) == change.fits, change.overrides
        if change.seen and change.fits:
            then = simulate(changed, with_mib(600), PLAIN)[0]
            assert change.saved_bytes == now.memory.peak_allocated_bytes - then.memory.peak_allocated_bytes
            assert change.slowdown == pytest.approx(now.step.tokens_per_s / then.step.tokens_per_s)
    fields = {name: parse_yaml(value, name) for name, value in (w.split("=") for w in found.together.split())}
    assert fits(check_recipe({**heavy.model_dump(), **fields}, "test"), with_mib(60))
    assert f"{found.together}: fits" in told


def test_what_cannot_be_simulated_keeps_what_arithmetic_says() -> None:
    found = fit_confirmed(tiny(compile=True, precision="bf16"), A100, PLAIN)
    assert (found.seen, found.fits_something) == (False, True)
    document = fit_document("tiny", "an A100", tiny(compile=True), found)
    assert any("by arithmetic alone" in note and "compile" in note for note in document["notes"])
    verdict, reason, *rest = fit_lines("tiny", "an A100", tiny(compile=True), A100, found)
    assert verdict.endswith(": fits by arithmetic")  # and no "fits as it is": a run may be refused, too
    assert reason.startswith("  by arithmetic alone, because it cannot be simulated: compile")
    assert any("not seen to fit" in line for line in rest)
    assert not any("cannot be simulated" in line for line in rest)


def olmo(tmp_path, **fields) -> Recipe:
    """A family that no recipe here has."""
    return Recipe(model=resized(tmp_path, model_type="olmo2"), seq_len=512, **fields)


def test_any_family_is_searched_by_simulation(tmp_path) -> None:
    recipe = olmo(tmp_path, micro_batch_size=16)
    found = fit_confirmed(recipe, with_mib(60), PLAIN)
    rows = found.largest["micro_batch_size"]
    assert 0 < rows.value < 16
    assert fits(recipe.model_copy(update={"micro_batch_size": rows.value}), with_mib(60))
    assert not fits(recipe.model_copy(update={"micro_batch_size": rows.next_value}), with_mib(60))
    assert any(change.seen and change.fits for change in found.changes)


@pytest.mark.parametrize("mib", [40, 12])
def test_a_size_takes_few_simulations(tmp_path, monkeypatch, mib: int) -> None:
    """Nothing fits at the recipe's own length, and with the smaller memory no length does: one more is tried.
    Otherwise no more than halving what is below would take."""
    asked: list[tuple[Recipe, int, Settings | None]] = []

    def counted(recipe: Recipe, hardware: Hardware, settings: Settings | None, **options):
        asked.append((recipe, hardware.memory_bytes, settings))
        return simulate(recipe, hardware, settings, **options)

    monkeypatch.setattr("harness.simulate.simulate", counted)
    recipe = olmo(tmp_path, micro_batch_size=1).model_copy(update={"seq_len": 8192})
    found = fit_confirmed(recipe, with_mib(mib), EXPANDABLE)
    tokens = found.largest["seq_len"]
    assert tokens.tried[8192] is False
    halvings = math.log2(8192 // tokens.multiple_of)
    assert len(tokens.tried) <= 1 + (halvings if tokens.value else 1)
    assert bool(tokens.value) == (mib == 40)
    assert len(asked) == len(set(asked))  # none twice


def test_what_neither_can_answer_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nobodys"}')  # no family, and no sizes
    with pytest.raises(InputError):
        fit_confirmed(Recipe(model=str(tmp_path / "config.json"), compile=True), A100, PLAIN)
    with pytest.raises(InputError, match="--margin"):
        fit_confirmed(LORA, A100, PLAIN, margin=1.5)
    with pytest.raises(InputError, match="the inputs of 100,000,000 rows of 2,048 tokens alone are larger"):
        simulations_on([A100], print).simulated(tiny(micro_batch_size=10**8, seq_len=2048))


def test_the_document_says_what_was_seen() -> None:
    document = json.loads(json.dumps(fit_document("lora", "100 MiB", LORA, confirmed(100))))
    rows = confirmed(100).largest["micro_batch_size"]
    assert document["seen_by_simulation"]
    assert document["largest_micro_batch_size"] == rows.value
    assert document["simulated"]["micro_batch_size"]["next"] == rows.next_value
    assert document["simulated"]["micro_batch_size"]["tried"][str(rows.next_value)] is False


@pytest.mark.parametrize("mib", SIZES)
def test_what_fits_says_how_fast_it_is(mib: int) -> None:
    """Sizes that a formula found, too: as fast as a simulation of them says."""
    for field, found in confirmed(mib).largest.items():
        assert found.value
        assert found.profile is not None
        again = simulate(LORA.model_copy(update={field: found.value}), with_mib(mib))[0]
        assert found.profile.step.tokens_per_s == pytest.approx(again.step.tokens_per_s, rel=1e-9)


def test_a_full_size_recipe_of_which_arithmetic_says_too_much() -> None:
    """Mistral-7B in nf4 with checkpointing on an RTX 4090: 13 rows by arithmetic, of which 12 already leave
    3.96 GiB in pieces when 2.93 are asked for."""
    recipe = Recipe(model="mistral-7b", quantization="nf4", adapter="lora", gradient_checkpointing=True)
    device = find_hardware("rtx-4090")
    rows = fit_exact(recipe, Simulations(device))
    assert fit(recipe, device).micro_batch_size > (rows.value or 0)
    assert rows.next_profile is not None
    assert rows.next_profile.oom is not None
    assert (rows.next_profile.oom.reserved_unallocated_bytes or 0) > (
        rows.next_profile.oom.requested_bytes or 0
    )
    assert len(rows.tried) <= 5  # of which the last is by the formula


@keeps_workspaces
def test_a_step_seen_at_one_size_is_spelled_in_the_dimensions_of_the_model() -> None:
    recipe, simulations = tiny(micro_batch_size=2, seq_len=96), Simulations(A100)
    simulations.simulated(recipe)
    found = held_back(recipe, simulations)
    assert found is not None
    assert re.search(r"\d+ × B·S·\w × 4 B = .* with B = 2 rows, S = 96 tokens, \w = ", found.sentence)
    assert found.in_words.startswith("what grows most: ")  # what is spelled with B grows with it


def test_scores_of_attention_have_heads_and_no_rank() -> None:
    """By hand: 4 heads, scores in fp32; 2 rows and heads of 8 bytes would be as many."""
    recipe = tiny(attention="eager", adapter="lora", lora_rank=2, micro_batch_size=2, seq_len=1024)
    simulations = Simulations(A100)
    for tokens in (1024, 2048):
        simulations.simulated(recipe.model_copy(update={"seq_len": tokens}))
    found = held_back(recipe, simulations)
    assert found is not None
    assert re.search(r"\d+ × B·S²·N × 4 B = .*, N = 4 heads of attention$", found.sentence)


@keeps_workspaces
def test_pairs_are_called_so() -> None:
    recipe, simulations = tiny(task="reward", micro_batch_size=2, seq_len=96), Simulations(A100)
    simulations.simulated(recipe)
    found = held_back(recipe, simulations)
    assert found is not None
    assert " B = 2 pairs, " in found.sentence


@long
@pytest.mark.parametrize("task", ["dpo", "orpo", "reward"])
def test_no_answer_says_rows_where_a_micro_batch_is_pairs(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one more takes is that of two rows: a text that is chosen and one that is not."""
    recipe = tiny(task=task, seq_len=128, lora_dropout=0.0)
    found = fit_confirmed(recipe, with_mib(200), PLAIN)
    text = "\n".join(fit_lines("pairs", "here", recipe, with_mib(200), found))
    assert "a pair more takes" in text
    assert re.search(r"what grows most: .* B = \d+ pairs, S = ", text)
    assert " row" not in text
    monkeypatch.setattr("harness.fit.device_choice.all_hardware", lambda prices: [A100])
    choice = render_choice("pairs", compare_hardware(recipe, {}, best=True), recipe.unit)
    assert " pairs " in choice.splitlines()[2]
    assert "rows" not in choice


@long
def test_a_size_that_is_no_whole_number_of_bytes_at_a_point_is_simulated_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside another thread one process makes both searches: what the first learnt of rows and of lengths
    spans points at which orpo's copies of the chosen rows are no whole numbers."""
    monkeypatch.setattr("harness.fit.simulations._may_fork", lambda: False)
    recipe = tiny(task="orpo", seq_len=128)
    alone = {name: found.value for name, found in fit_confirmed(recipe, with_mib(200), PLAIN).largest.items()}
    assert alone["micro_batch_size"]
    assert alone["seq_len"]


@keeps_workspaces
@long
def test_a_part_of_a_weight_is_spelled_with_the_gpus_that_divide_it(tmp_path):
    """Each of 4 GPUs has 4,096 × 64 / 4 numbers of each of 72 weights of MLPs when AdamW makes room for them
    all; a layer's keys have 16 numbers too, which is chance."""
    sizes = {"intermediate_size": 4096, "num_hidden_layers": 24, "vocab_size": 64, "num_key_value_heads": 1}
    divided: dict[str, Any] = {"parallel": "fsdp", "dp_shard": 4}
    recipe = Recipe(model=resized(tmp_path, **sizes), seq_len=64, gradient_checkpointing=True, **divided)
    simulations = Simulations(find_hardware("h100"))
    for tokens in (64, 128):
        simulations.simulated(recipe.model_copy(update={"seq_len": tokens}))
    found = held_back(recipe, simulations)
    assert found is not None
    of_weights = 72 * 4096 * 16 * 2
    assert f"72 × H·F/4 × 2 B = {of_weights / MiB:.1f} MiB" in found.sentence
    assert found.in_words.startswith("what fills most beside weights, gradients and optimizer state: temp")
    letters = "with H = 64 numbers of a hidden state, F = 4,096 numbers inside an MLP"
    assert f", {letters}, a part on each of 4 GPUs" in found.sentence


def test_it_says_what_holds_it_back_and_what_is_free_to_change(tmp_path) -> None:
    """Logits of a large vocabulary, which Liger's loss never has as a whole."""
    words = 8192
    recipe = Recipe(model=resized(tmp_path, vocab_size=words), adapter="lora", seq_len=1024)
    found = fit_confirmed(recipe, with_mib(512), PLAIN)
    rows = found.largest["micro_batch_size"].value or 0
    logits = rows * 1024 * words * 4
    assert found.held_back is not None
    assert "what grows most: logits, their copies and gradients: 3 × B·S·V × 4 B" in found.held_back.in_words
    assert f"{3 * logits / 2**30:.2f} GiB" in found.held_back.sentence
    if found.neutral is not None:  # Liger is installed here
        overrides, larger, slowdown = found.neutral
        assert overrides == "loss=fused_linear"
        assert larger > rows
        asked = recipe.model_copy(update={"loss": "fused_linear", "micro_batch_size": larger})
        assert fits(asked, with_mib(512))
        sizes = {"micro_batch_size": rows}
        with_loss = [
            recipe.model_copy(update={**sizes, "loss": loss}) for loss in ("standard", "fused_linear")
        ]
        one, other = (simulate(each, with_mib(512))[0].step.tokens_per_s or 0 for each in with_loss)
        assert slowdown == pytest.approx(one / other, rel=1e-9)
        assert one / other > 1.05  # the logits are most of the step, and computed again in pieces
        text = "\n".join(fit_lines("logits", "here", recipe, with_mib(512), found))
        assert (
            f"loss=fused_linear, with which a token takes {one / other - 1:.0%} longer: micro_batch" in text
        )


@keeps_workspaces
def test_of_several_gpus_it_says_how_many_would_be_enough(tmp_path):
    """Every number is simulated here: the first that fits is the one that is named."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_key_value_heads": 4}
    recipe = Recipe(model=resized(tmp_path, **sizes), seq_len=64, parallel="fsdp", dp_shard=2)
    h100 = find_hardware("h100")

    eight = simulate(recipe.model_copy(update={"dp_shard": 8}), h100)[0].memory.process_bytes
    assert eight is not None
    device = with_memory(h100, eight)  # enough for 8
    assert not fits(recipe, device)
    found = fit_confirmed(recipe, device, PLAIN)
    expected: dict[str, bool] = {}
    for gpus in (4, 8, 16):
        more = recipe.model_copy(update={"dp_shard": gpus})
        expected[f"{gpus} GPUs (dp_shard={gpus})"] = fits(more, device)
        if fits(more, device):
            break
    assert list(expected.values())[-1] is True
    assert found.wider.pop("PYTORCH_ALLOC_CONF=expandable_segments:True") is False
    assert found.wider == expected
    text = "\n".join(fit_lines("two", "here", recipe, device, found))
    assert f"  {list(expected)[-1]}: fits" in text
    assert "cpu_offload=true" in [change.overrides for change in found.changes]


# the largest value of one field, by simulation alone


def test_a_recipe_that_is_too_large_as_it_is_shrinks() -> None:
    heavy = LORA.model_copy(update={"micro_batch_size": 8})
    told: dict[int, bool] = {}
    found = fit_exact(heavy, Simulations(with_mib(60)), told=told.__setitem__)
    assert found.value == found_in(60).value
    assert told == found.tried
    assert next(iter(told)) == 8  # it starts at what the recipe says


def test_when_nothing_fits_there_is_no_value() -> None:
    found = fit_exact(LORA, Simulations(with_mib(4)))
    assert (found.value, found.profile, found.next_value) == (None, None, 1)
    assert found.next_profile is not None
    assert found.next_profile.oom is not None


def test_a_limit_that_is_not_memory_is_named() -> None:
    found = fit_exact(tiny("gpt2", seq_len=128), Simulations(A100), "seq_len", multiple_of=128)
    assert (found.value, found.next_value) == (128, 256)  # tests/models/gpt2.json has 128 positions
    assert found.next_profile is None
    assert found.limit is not None
    assert "positions" in found.limit


def test_less_memory_than_the_context_takes_fits_nothing() -> None:
    assert fit_exact(LORA, Simulations(with_memory(A100, 5))).value is None


def test_json_has_what_was_found_and_tried() -> None:
    document = json.loads(json.dumps(found_in(60).as_json()))
    assert document["largest"] == found_in(60).value
    assert document["peak_reserved_bytes"] + document["spare_bytes"] == 60 * MiB
    assert document["too_tight_to_call"] is (document["spare_bytes"] < with_mib(60).memory_bytes * 0.02)
    assert document["next_out_of_memory_in"] in ("forward", "backward")
    assert document["tried"][str(document["next"])] is False
    nothing = fit_exact(LORA, Simulations(with_mib(4))).as_json()
    assert (nothing["largest"], nothing["peak_allocated_bytes"]) == (None, None)


def test_what_is_offloaded_is_said_as_it_is_simulated() -> None:
    recipe, device = LORA.model_copy(update={"offload": ("activations",)}), with_mib(60)
    found = fit_exact(recipe, Simulations(device))
    there = recipe.model_copy(update={"micro_batch_size": found.value})
    assert found.as_json()["host_bytes"] == simulate(there, device)[0].memory.host_bytes > 0
    assert found_in(60).as_json()["host_bytes"] is None


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(InputError, match="compile"):
        fit_exact(tiny(compile=True), Simulations(A100))
