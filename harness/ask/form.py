"""The form of a question: its fields with their choices and sentences, and the choices that are impossible
beside those already made.
"""

from functools import cache
from typing import Any, cast

from harness.ask.question import ASKED, After
from harness.hardware import DEFAULT_HARDWARE, all_hardware
from harness.recipe import (
    ImpossiblePair,
    Recipe,
    check_recipe,
    list_card_recipes,
    list_models,
    list_recipes,
    recipe_schema,
    shown,
)
from harness.units import in_gib

_PLAIN = {"quantization": "none", "double_quant": "false", "upcast_for_kbit": "false"}
METHODS: dict[str, dict[str, str]] = {
    "full fine-tuning": {"adapter": "none", **_PLAIN},
    "LoRA": {"adapter": "lora", **_PLAIN},
    "QLoRA": {"adapter": "lora", "quantization": "nf4"},
    "LoRA over int8": {"adapter": "lora", "quantization": "int8", "double_quant": "false"},
    "IA3": {"adapter": "ia3", **_PLAIN},
}
"""The usual names of fine-tuning methods, and the fields that each one sets. A page recognizes a method by
adapter and quantization."""
GROUPS: dict[str, tuple[str, ...]] = {
    "Step": ("seq_len", "micro_batch_size", "gradient_accumulation_steps", "precision"),
    "Toggles": (
        "gradient_checkpointing", "attention", "loss", "optimizer", "optimizer_impl", "optimizer_in_backward",
        "offload", "packing", "master_weights", "compile", "max_grad_norm",
        "weight_decay",
    ),
    "Method": (
        "quantization", "double_quant", "upcast_for_kbit", "adapter", "lora_rank", "lora_targets",
        "lora_dropout", "adapter_dtype",
    ),
    "Several GPUs": (
        "parallel", "dp_shard", "dp_replicate", "tp", "reshard_after_forward", "reduce_dtype",
        "sync_each_micro_batch", "wrap", "cpu_offload",
    ),
}  # fmt: skip
"""The fields of a recipe that the form shows together, by the group's title. The other fields that a question
may set follow in a group of their own."""
AFTER = "After the training steps"
FOLDED = ("Method", "Several GPUs", "Others", AFTER)
"""The groups that a page shows closed until the reader opens them."""


@cache
def describe_form() -> dict[str, Any]:
    """The whole form as plain data: groups of fields, methods, recipes, models and devices."""
    grouped = {"model", *(name for names in GROUPS.values() for name in names)}
    rest = tuple(name for name in ASKED if name not in grouped)
    return {
        "groups": [
            {"name": group, "folded": group in FOLDED, "fields": [_field(name) for name in names]}
            for group, names in {**GROUPS, "Others": rest, AFTER: tuple(After.model_fields)}.items()
            if names
        ],
        "model": _field("model"),
        "methods": METHODS,
        "recipes": [
            *({"name": name, "about": about} for name, about in list_recipes()),
            *({"name": recipe.name, "about": recipe.description} for recipe in list_card_recipes()),
        ],
        "models": list_models(),
        "devices": [
            {"name": device.name, "title": device.datasheet.title, "memory": in_gib(device.memory_bytes)}
            for device in all_hardware()
        ],
        "hardware": DEFAULT_HARDWARE,
    }


def impossible(recipe: Recipe) -> dict[str, dict[str, str]]:
    """The choices that the recipe cannot have with its other fields as they are, and why, by field and
    choice."""
    fields, found = recipe.model_dump(), dict[str, dict[str, str]]()
    for name in ASKED:
        for choice in _choices(name):
            if shown(fields[name]) == shown(choice):
                continue
            value = (*fields[name], choice) if name == "offload" and choice not in fields[name] else choice
            try:
                check_recipe({**fields, name: value}, "")
            except ImpossiblePair as error:
                found.setdefault(name, {})[shown(choice)] = error.rule
    return found


def _field(name: str) -> dict[str, Any]:
    """One field as a page draws it: a switch, one choice, several choices, a number, or text."""
    schema = _schema(name)
    options = [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]
    if schema.get("type") == "boolean":
        kind = "switch"
    elif schema.get("type") == "array":
        kind = "several"
    elif _choices(name):
        kind = "choice"
    else:
        kind = "number" if options[0].get("type") in ("integer", "number") else "text"
    whole = options[0].get("type") == "integer"
    numbers = {
        "least": options[0].get("minimum", options[0].get("exclusiveMinimum", 0) + whole),
        "empty": "null" if options != schema.get("anyOf", [schema]) else None,
        "whole": whole,
    }
    return {
        "name": name,
        "kind": kind,
        "choices": [shown(choice) for choice in _choices(name)],
        "about": " ".join(schema.get("description", "").split()),
        **(numbers if kind == "number" else {}),
    }


def _schema(name: str) -> dict[str, Any]:
    """The JSON schema of a field."""
    fields = After.model_json_schema() if name in After.model_fields else recipe_schema()
    return fields["properties"][name]


@cache
def _choices(name: str) -> tuple[Any, ...]:
    """Every value of a field that has a fixed set of them, or of the items of a list; empty for others."""
    schema = _schema(name)
    if schema.get("type") == "boolean":
        return (False, True)
    if "items" in schema:
        return tuple(cast("list[Any]", schema["items"].get("enum", [])))
    options = schema.get("anyOf", [schema])
    values = [value for option in options for value in option.get("enum", [])]
    return (None, *values) if values and {"type": "null"} in options else tuple(values)
