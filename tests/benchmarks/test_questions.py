"""What the guide says that its commands print is what they print."""

import json
from importlib.metadata import version

import pytest

from benchmarks.questions import QUESTIONS, RESULTS, ask

FOUND = json.loads(RESULTS.read_bytes())
LIBRARIES = ("torch", "transformers", "peft")
SLOW = (
    *("evaluation", "lengths", "qlora-14b", "gemma-27b", "cheapest", "cheapest-best", "seventy"),
    *("seventy-16", "toggles", "dpo", "dpo-full"),
)
OF_TWO_ENVIRONMENTS = "versions"


def test_every_question_has_been_asked() -> None:
    assert FOUND["shown"].keys() == QUESTIONS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name, question in QUESTIONS.items()
        if name != OF_TWO_ENVIRONMENTS and not question.script  # those: tests/virtual_gpu/test_weights.py
    ],
)
def test_the_answer_is_the_same_today(name: str) -> None:
    recorded = FOUND["provenance"]["versions"]
    if any(recorded[library].split("+")[0] != version(library).split("+")[0] for library in LIBRARIES):
        pytest.skip("the answers are of other releases")
    assert ask(QUESTIONS[name], {}) == FOUND["shown"][name]


def test_two_environments_differ() -> None:
    """Which is what that question is about; harness diff itself: tests/answers/test_two_profiles.py."""
    shown = FOUND["shown"][OF_TWO_ENVIRONMENTS]
    assert "versions: torch " in shown
    assert "the same to the byte" not in shown
