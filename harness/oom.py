"""What to say when the memory ran out: where, what filled it, and which changes of the recipe would help."""

from __future__ import annotations

from typing import Any

from harness.console import in_gib
from harness.errors import InputError
from harness.recipe import Recipe
from harness.recipe_check import check_recipe
from harness.step_profile import CATEGORIES, MemoryBreakdown, OutOfMemoryReport, StepProfile

REMEDIES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "activations": [
        ({"gradient_checkpointing": True}, "recomputes activations instead of keeping them"),
        ({"offload": ["activations"]}, "keeps activations in host memory"),
        ({"loss": "fused_linear"}, "never holds all the logits"),
    ],
    "parameters": [
        ({"quantization": "nf4"}, "keeps the frozen weights in 4 bits"),
        ({"precision": "bf16"}, "halves the weights"),
    ],
    "gradients": [
        ({"optimizer_in_backward": True}, "frees each gradient as soon as it is used"),
        ({"adapter": "lora"}, "trains few weights, so few gradients and little optimizer state"),
    ],
    "optimizer_state": [
        ({"optimizer": "adamw_8bit"}, "keeps the moments in 8 bits"),
        ({"offload": ["optimizer"]}, "keeps the moments in host memory"),
        ({"adapter": "lora"}, "trains few weights, so few gradients and little optimizer state"),
    ],
    "temporaries": [({"optimizer_impl": "for_loop"}, "steps one weight at a time")],
}
"""By what fills the memory: fields to change, and what that does."""


def remedies(recipe: Recipe, at_peak: MemoryBreakdown, report: OutOfMemoryReport) -> list[str]:
    """Changes that this recipe allows and does not have yet, for the largest category first: at most four."""
    lines = []
    idle = report.reserved_unallocated_bytes or 0
    if report.requested_bytes is not None and idle >= report.requested_bytes:
        lines.append(
            f"PYTORCH_ALLOC_CONF=expandable_segments:True: {in_gib(idle)} are reserved, but in pieces"
        )
    size = recipe.micro_batch_size
    if size > 1:
        part = next(part for part in range(size // 2, 0, -1) if size % part == 0)
        parts = recipe.gradient_accumulation_steps * size // part
        lines.append(
            f"micro_batch_size={part} gradient_accumulation_steps={parts}: the same step in more parts"
        )
    for category in sorted(CATEGORIES, key=lambda name: -(getattr(at_peak, f"{name}_bytes") or 0)):
        for change, effect in REMEDIES.get(category, []):
            line = f"{' '.join(map(_override, change.items()))}: {effect}"
            if line not in lines and _is_new_and_possible(recipe, change):
                lines.append(line)
    return lines[:4]


def explain(profile: StepProfile) -> str:
    """One paragraph: where it ran out, what was asked for, what filled the memory; then the advice."""
    oom = profile.oom
    assert oom is not None
    asked = "" if oom.requested_bytes is None else f", asking for {in_gib(oom.requested_bytes)}"
    free = "" if oom.free_bytes is None else f" with {in_gib(oom.free_bytes)} free"
    largest = ", ".join(f"{in_gib(a.size_bytes)} of {a.category}" for a in oom.top[:5])
    filled = f" The largest tensors: {largest}." if largest else ""
    advice = "".join(f"\n  {line}" for line in oom.advice)
    what_to_do = f" What would help:{advice}" if advice else ""
    return f"out of memory in {oom.phase}{asked} on {profile.hardware.name}{free}.{filled}{what_to_do}"


def _override(change: tuple[str, Any]) -> str:
    name, value = change
    text = ",".join(value) if isinstance(value, list) else str(value)
    return f"{name}={text.lower() if isinstance(value, bool) else text}"


def _is_new_and_possible(recipe: Recipe, change: dict[str, Any]) -> bool:
    fields = recipe.model_dump(mode="json")
    if all(fields[name] == value for name, value in change.items()):
        return False
    try:
        check_recipe({**fields, **change}, "advice")
    except InputError:
        return False
    return True
