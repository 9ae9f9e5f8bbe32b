"""What is said when the memory ran out."""

from __future__ import annotations

import pytest

from harness.oom import REMEDIES, explain, remedies
from harness.recipe import Recipe
from harness.recipe_check import check_recipe
from harness.step_profile import (
    CATEGORIES,
    Allocation,
    HardwareSummary,
    MemoryBreakdown,
    MemoryStats,
    OutOfMemoryReport,
    StepProfile,
)

GIB = 2**30
FULL = Recipe(model="llama-3.1-8b", micro_batch_size=6, gradient_accumulation_steps=2)


def advice(recipe: Recipe, report: OutOfMemoryReport | None = None, **filled: int) -> list[str]:
    at_peak = MemoryBreakdown(**{f"{name}_bytes": size for name, size in filled.items()})
    return remedies(recipe, at_peak, report or OutOfMemoryReport(phase="forward"))


def changes_of(line: str) -> dict[str, str]:
    return dict(word.split("=") for word in line.split(": ")[0].split(" "))


def test_what_fills_the_memory_comes_first():
    lines = advice(FULL, activations=9, optimizer_state=5)
    assert changes_of(lines[0]) == {"micro_batch_size": "3", "gradient_accumulation_steps": "4"}
    assert changes_of(lines[1]) == {"gradient_checkpointing": "true"}
    assert changes_of(advice(FULL, activations=5, optimizer_state=9)[1]) == {"optimizer": "adamw_8bit"}


def test_the_same_step_has_as_many_sequences():
    for size in (2, 3, 4, 5, 6, 7, 9, 12):
        recipe = Recipe(model="m", micro_batch_size=size, gradient_accumulation_steps=3)
        changed = changes_of(advice(recipe)[0])
        parts = int(changed["micro_batch_size"]), int(changed["gradient_accumulation_steps"])
        assert parts[0] * parts[1] == size * 3
        assert parts[0] < size


def test_memory_in_pieces_is_named():
    report = OutOfMemoryReport(phase="backward", requested_bytes=GIB, reserved_unallocated_bytes=3 * GIB)
    assert "expandable_segments" in advice(FULL, report)[0]
    smaller = report.model_copy(update={"reserved_unallocated_bytes": GIB - 1})
    assert not any("expandable_segments" in line for line in advice(FULL, smaller))


@pytest.mark.parametrize("category", REMEDIES)
def test_every_advice_is_a_recipe_that_is_possible_and_new(category):
    base = Recipe(model="llama-3.1-8b", adapter="lora", gradient_checkpointing=True)
    lines = advice(base, **{category: 1})
    for line in lines:
        changed = changes_of(line)
        changed["offload"] = changed.get("offload", "none")
        for name, value in changed.items():
            if name in ("gradient_checkpointing", "optimizer_in_backward"):
                changed[name] = value == "true"  # type: ignore[assignment]
        assert check_recipe({**base.model_dump(mode="json"), **changed}, "test") != base
    assert not any("gradient_checkpointing" in line for line in lines)


def test_impossible_changes_are_not_advised():
    quantized = Recipe(model="m", adapter="lora", quantization="nf4", optimizer="adamw_8bit")
    lines = advice(quantized, parameters=1, optimizer_state=1)
    assert not any("quantization" in line or "offload=optimizer" in line for line in lines)


def test_categories_are_real():
    assert set(REMEDIES) <= set(CATEGORIES)


def test_one_paragraph_says_where_what_and_how_much():
    report = OutOfMemoryReport(
        phase="backward",
        requested_bytes=2 * GIB,
        free_bytes=GIB // 2,
        top=[Allocation(size_bytes=4 * GIB, category="activations")],
        advice=["gradient_checkpointing=true: recomputes"],
    )
    profile = StepProfile(
        source="measured",
        recipe={},
        hardware=HardwareSummary(name="A GPU", kind="cuda"),
        memory=MemoryStats(kind="cuda_allocator"),
        oom=report,
    )
    assert explain(profile) == (
        "out of memory in backward, asking for 2.00 GiB on A GPU with 0.50 GiB free. "
        "The largest tensors: 4.00 GiB of activations. What would help:\n"
        "  gradient_checkpointing=true: recomputes"
    )
