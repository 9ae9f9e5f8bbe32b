"""Recipe: the fields, and the pairs of fields that cannot work together."""

import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.recipe.check import accepted_values
from harness.recipe.fields import (
    Adapter,
    Attention,
    Offload,
    Optimizer,
    Parallel,
    Precision,
    Quantization,
    Wrap,
)
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


# Everything that a rule reads, with every choice.
ANY_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "precision": st.sampled_from(get_args(Precision)),
        "master_weights": st.booleans(),
        "quantization": st.sampled_from(get_args(Quantization)),
        "double_quant": st.booleans(),
        "upcast_for_kbit": st.booleans(),
        "adapter": st.sampled_from(get_args(Adapter)),
        "adapter_dtype": st.sampled_from(("fp32", "base")),
        "use_dora": st.booleans(),
        "use_rslora": st.booleans(),
        "lora_plus_ratio": st.sampled_from((None, 16.0)),
        "peft": st.sampled_from(({}, {"bias": "all"}, {"peft_type": "VERA"})),
        "lora_targets": st.sampled_from(("all-linear", ("q_proj",), ())),
        "gradient_checkpointing": st.booleans(),
        "attention": st.sampled_from(get_args(Attention)),
        "loss": st.sampled_from(get_args(Recipe.model_fields["loss"].annotation)),
        "packing": st.booleans(),
        "optimizer": st.sampled_from(get_args(Optimizer)),
        "optimizer_impl": st.sampled_from(("foreach", "fused", "for_loop")),
        "optimizer_in_backward": st.booleans(),
        "offload": st.lists(st.sampled_from(get_args(Offload)), unique=True),
        "compile": st.booleans(),
        "micro_batch_size": st.integers(1, 3),
        "gradient_accumulation_steps": st.integers(1, 3),
        "max_grad_norm": st.sampled_from((None, 1.0)),
        "parallel": st.sampled_from(get_args(Parallel)),
        "dp_replicate": st.integers(1, 2),
        "dp_shard": st.integers(1, 2),
        "tp": st.integers(1, 2),
        "reshard_after_forward": st.booleans(),
        "reduce_dtype": st.sampled_from((None, "fp32", "bf16")),
        "sync_each_micro_batch": st.booleans(),
        "wrap": st.sampled_from(get_args(Wrap)),
        "cpu_offload": st.booleans(),
    },
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
