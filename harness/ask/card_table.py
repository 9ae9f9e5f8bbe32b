"""The same recipe on every card of the table, by arithmetic."""

from __future__ import annotations

from typing import Any

from harness.ask.question import Question
from harness.fit import compare_hardware
from harness.units import in_gib


def on_every_card(question: Question) -> list[dict[str, Any]]:
    """What `harness hardware --quick` lists, for reading: those that fit first, the fastest first. Raises
    InputError for a model that arithmetic does not know."""
    return [
        {
            "name": offer.name,
            "title": offer.title,
            "memory": in_gib(offer.memory_bytes),
            "needs": in_gib(offer.required_bytes),
            "fits": offer.fits,
            "reason": offer.reason,
            "tokens_per_s": "-" if offer.tokens_per_s is None else f"{offer.tokens_per_s:,.0f}",
        }
        for offer in compare_hardware(question.recipe, {}, by_arithmetic=True)
    ]
