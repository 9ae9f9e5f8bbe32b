"""Recipe: the fields, and the pairs of fields that cannot work together."""

import re
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.recipe.check import accepted_values
from harness.recipe.fields import Offload
from harness.recipe.recipe import Recipe
from harness.recipe.rules import RULES, Rule, first_broken_rule
from harness.system.strict_yaml import parse_yaml
from tests.support.broken_recipes import BROKEN


def recipe(**fields: Any) -> Recipe:
    return Recipe(model="llama-3.2-1b", **fields)


def message_of(**fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        recipe(**fields)
    (error,) = caught.value.errors()
    return error["msg"]


def fixes_in(message: str) -> list[tuple[str, Any]]:
    """The `field: value` pairs that a message proposes: those after its last semicolon."""
    advice = message.rpartition("; ")[2]
    found = re.findall(r"(\w+): (\[\w*\]|[\w-]+)", advice)
    return [(name, parse_yaml(value, name)) for name, value in found if name in Recipe.model_fields]


def test_every_rule_has_an_example() -> None:
    assert len(BROKEN) == len(RULES) == 116


EACH_RULE = pytest.mark.parametrize(
    ("rule", "fields"),
    list(zip(RULES, BROKEN, strict=True)),
    ids=[" ".join(f"{name}={value}" for name, value in fields.items()) for fields in BROKEN],
)


@EACH_RULE
def test_the_message_names_both_fields_and_every_fix_it_proposes_works(
    rule: Rule, fields: dict[str, Any]
) -> None:
    message = message_of(**fields)
    assert rule.message in message
    for name in rule.fields:
        assert f"{name}: " in message
    fixes = fixes_in(message)
    assert fixes
    for name, value in fixes:
        recipe(**fields | {name: value})


@EACH_RULE
def test_the_example_is_minimal(rule: Rule, fields: dict[str, Any]) -> None:
    """With the default for either of the pair, it does not break this rule."""
    for name in set(rule.fields) & set(fields):
        rest = recipe().model_copy(update={other: fields[other] for other in fields if other != name})
        assert not rule.broken(rest)


SOME: dict[str, Any] = {
    "lora_plus_ratio": (None, 16.0),
    "peft": ({}, {"bias": "all"}, {"peft_type": "VERA"}),
    "lora_targets": ("all-linear", ("q_proj",), ()),
    "max_grad_norm": (None, 1.0),
    "reduce_dtype": (None, "fp32", "bf16"),
    "activation_memory_budget": (0.5, 1.0),
    "lora_dropout": (0.0, 0.1),
    "grpo_beta": (0.0, 0.04),
    "image_size": ((), (224,)),
    "data": ("synthetic", "org/dataset"),
    "num_labels": (2, 5),
    "seq_len": (64, 2048),
    "optimizer_rank": (8, 128),
}
"""Values of the fields that have no switch, no list of choices, and are no small numbers."""


def any_of(name: str) -> st.SearchStrategy[Any]:
    annotation = Recipe.model_fields[name].annotation
    if name == "offload":
        return st.lists(st.sampled_from(get_args(Offload)), unique=True)
    if annotation is bool:
        return st.booleans()
    choices = get_args(annotation) if get_origin(annotation) is Literal else SOME.get(name, (1, 2, 3))
    return st.sampled_from(choices)


# Everything that a rule is about, with every choice.
OF_RULES = sorted({name for rule in RULES for name in rule.fields} | {"micro_batch_size"})
ANY_FIELDS = st.sets(st.sampled_from(OF_RULES), max_size=14).flatmap(
    lambda names: st.fixed_dictionaries({name: any_of(name) for name in sorted(names)})
)


@settings(max_examples=200)
@given(ANY_FIELDS)
def test_any_combination_is_valid_or_refused_by_name_and_advice_leads_out(fields: dict[str, Any]) -> None:
    """Breadth first through all the fixes that the messages propose, until a recipe is valid."""
    attempts = [fields]
    for attempt in attempts:
        try:
            assert first_broken_rule(recipe(**attempt)) is None
            return
        except ValidationError as error:
            (message,) = [error["msg"] for error in error.errors()]
        (rule,) = [rule for rule in RULES if rule.message in message]
        assert all(f"{name}: " in message for name in rule.fields)
        fixed = [attempt | {name: value} for name, value in fixes_in(message)]
        attempts += [new for new in fixed if new not in attempts]
    pytest.fail("the advice goes round in circles")


def test_rules_name_real_fields() -> None:
    assert {name for rule in RULES for name in rule.fields} <= set(Recipe.model_fields)


def test_every_field_is_described() -> None:
    for name, field in Recipe.model_fields.items():
        assert field.description, name
        assert accepted_values(name)


def test_lists_may_be_written_as_one_name_or_with_commas() -> None:
    assert recipe(offload="activations").offload == ("activations",)
    assert recipe(offload="activations, optimizer").offload == ("activations", "optimizer")
    assert recipe(offload=None).offload == recipe(offload="none").offload == ()
    assert recipe(lora_targets="q_proj,v_proj").lora_targets == ("q_proj", "v_proj")
    assert recipe(lora_targets="all-linear").lora_targets == "all-linear"


def test_a_recipe_cannot_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        recipe().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("precision", "compute_dtype", "mixed", "scaled"),
    [
        ("fp32", "fp32", False, False),
        ("bf16", "bf16", False, False),
        ("fp16", "fp16", False, True),
        ("bf16-mixed", "bf16", True, False),
        ("fp16-mixed", "fp16", True, True),
    ],
)
def test_what_a_precision_means(precision: Any, compute_dtype: str, mixed: bool, scaled: bool) -> None:
    made = recipe(precision=precision)
    assert (made.compute_dtype, made.mixed, made.scaled) == (compute_dtype, mixed, scaled)


def test_tokens_per_step() -> None:
    # 3 sequences of 100 tokens, twice
    assert recipe(micro_batch_size=3, seq_len=100, gradient_accumulation_steps=2).tokens_per_step == 600
