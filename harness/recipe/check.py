"""Makes a Recipe of field values, or says in sentences which field is wrong and what to write instead."""

import re
from collections.abc import Collection, Mapping
from functools import cache
from itertools import islice
from typing import Any, cast

from pydantic import ValidationError

from harness.errors import InputError, nearest
from harness.recipe.recipe import Recipe
from harness.recipe.rules import shown

LONGEST_SHOWN = 80
"""Characters of a value that a message shows."""
MOST_SENTENCES = 5
"""Wrong fields that a message explains; it counts the others."""
_THOUSANDS = re.compile(r"(\d{1,6})[kK]")
"""A number of tokens as people write it, as 128k."""
COMMAND_LINE = "command line"
CALL = "call"
"""Names, in messages, of the two places where overrides are given."""
NOT_HERE: dict[str, dict[str, str]] = {
    "quantization": {
        **dict.fromkeys(
            ("nvfp4", "mxfp4"),
            "a format that transformers runs and does not train; what is published in it, as gpt-oss is, it "
            "trains as 16-bit weights (Mxfp4Config(dequantize=True)): write quantization: none, or for LoRA "
            "on a base in 4 bit quantization: nf4",
        ),
        "mxfp8": "a format of floats with shared scales",
        "fp8": "a format of products here and of no weights: write fp8: true",
        **dict.fromkeys(("gptq", "awq", "hqq", "aqlm", "eetq", "gguf"), "another library's format"),
        **dict.fromkeys(("int4", "4bit", "bnb_4bit"), "4 bits a weight: write quantization: nf4"),
        **dict.fromkeys(("8bit", "bnb_8bit"), "8 bits a weight: write quantization: int8"),
    },
    "optimizer": dict.fromkeys(("lomo", "adalomo", "sophia", "adam", "lion"), "another optimizer")
    | {name: f"AdamW of projected gradients: write optimizer: {name}_adamw" for name in ("galore", "apollo")}
    | {"schedule_free": "AdamW without a schedule: write optimizer: adamw_schedule_free"}
    | dict.fromkeys(("adamw_torch", "adamw_hf"), "torch's AdamW: write optimizer: adamw")
    | {
        "adamw_torch_fused": "AdamW in one kernel: write optimizer: adamw with optimizer_impl: fused",
        "adamw_bnb_8bit": "bitsandbytes' AdamW: write optimizer: adamw_8bit",
        "paged_adamw_32bit": "bitsandbytes' AdamW with fp32 states: write optimizer: paged_adamw",
    },
    "precision": {
        **dict.fromkeys(("float16", "half"), "16-bit floats: write precision: fp16"),
        "bfloat16": "the same as bf16: write precision: bf16",
        "float32": "32-bit floats: write precision: fp32",
        **dict.fromkeys(("fp8", "float8"), "products in 8-bit floats: write fp8: true"),
    },
    "loss": {
        **dict.fromkeys(("liger", "fused"), "Liger's fused linear cross-entropy: write loss: fused_linear"),
        **dict.fromkeys(("cce", "cut_cross_entropy"), "another package's"),
    },
    "offload": {"cpu": "where all of these go: write offload: activations, or another of them"},
    "parallel": {
        "zero3": "DeepSpeed's, and FSDP2 divides the same: write parallel: fsdp",
        **dict.fromkeys(("zero1", "zero2", "deepspeed", "pp"), "an engine"),
    },
    "adapter": {
        name: f"a method of peft: write adapter: peft with peft: {{peft_type: {name.upper()}}}"
        for name in ("vera", "loha", "lokr", "oft", "adalora")
    }
    | {"dora": "LoRA with lengths: write adapter: lora with use_dora: true"}
    | {"qlora": "LoRA over a quantized base: write adapter: lora with quantization: nf4"},
    "attention": {
        "xformers": "another implementation",
        "flex": "PyTorch's FlexAttention: write attention: flex_attention",
        **dict.fromkeys(
            ("flash", "flash_attn", "flash_attention", "fa2"),
            "FlashAttention: write attention: flash_attention_2",
        ),
    },
}
"""By field: values of other programs, which are no misspellings of values here, and what each one is. A text
with a colon says what to write; any other is followed by ", which harness does not have"."""

NAMED_ELSEWHERE = {
    "lr": "learning_rate",
    "r": "lora_rank",
    "target_modules": "lora_targets",
    **dict.fromkeys(("max_length", "context", "context_length", "block_size", "tokens"), "seq_len"),
    **dict.fromkeys(("batch", "bs"), "micro_batch_size"),
    **dict.fromkeys(("grad_accum", "accumulate_grad_batches"), "gradient_accumulation_steps"),
    **dict.fromkeys(("tiled_mlp", "tiled_mlp_num_shards"), "mlp_tiles"),
    **dict.fromkeys(("liger", "use_liger_kernel"), "kernels"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype"), "precision"),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), "quantization"),
    **dict.fromkeys(("epochs", "num_train_epochs"), "steps"),
    **dict.fromkeys(("fsdp", "deepspeed", "zero"), "parallel"),
    **dict.fromkeys(("gpus", "num_gpus", "world_size"), "dp_shard"),
}
"""Names that arguments of transformers, peft and TRL have, and the recipe's field that each one means. Listed
are those that no comparison of spellings would find."""
CARD = ("gpu", "card")
"""Names that people try for the device of the hardware table."""
BESIDE = ("device", "gpu", "gpus", "hardware", "memory", "out", "phases", "price", "prices")
"""Options of commands, and arguments of the Python API and of MCP, that are no fields of a recipe."""


class ImpossiblePair(InputError):
    """Two fields, each of which is possible by itself, exclude each other. `rule` names them and the fix."""

    def __init__(self, origin: str, rule: str) -> None:
        super().__init__(f"{origin}: {rule}.")
        self.rule = rule


def check_recipe(
    fields: Mapping[str, Any], origin: str, overridden: Collection[str] = (), given: str = COMMAND_LINE
) -> Recipe:
    """The Recipe with these field values; the others take their defaults.

    `origin` is where the values come from, and `overridden` names those that were `given` otherwise: on
    the command line, or in a call. Raises InputError with one sentence for each wrong field, or for the first
    impossible pair.
    """
    try:
        return Recipe.model_validate(dict(fields))
    except ValidationError as error:
        first_error_of: dict[object, Any] = {}
        for problem in error.errors(include_url=False):
            first_error_of.setdefault(problem["loc"][0] if problem["loc"] else None, problem)
        if None in first_error_of:
            changed = f" with {', '.join(overridden)} from the {given}" if overridden else ""
            rule = str(first_error_of[None]["ctx"]["error"])
            raise ImpossiblePair(f"{origin}{changed}", rule) from None
        sentences = [
            f"{given if name in overridden else origin}: {_sentence(str(name), problem, fields)}"
            for name, problem in islice(first_error_of.items(), MOST_SENTENCES)
        ]
        unsaid = len(first_error_of) - MOST_SENTENCES
        more = [f"And {unsaid} more fields are wrong."] if unsaid > 0 else []
        raise InputError(" ".join(sentences + more)) from None


@cache
def recipe_schema() -> dict[str, Any]:
    """JSON Schema of a recipe file, with a description of every field, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}


def accepted_values(field: str) -> str:
    """What `field` accepts, in words: "a whole number of at least 2", "one of none, lora, ia3"."""
    schema = recipe_schema()["properties"][field]
    return " or ".join(_in_words(option) for option in schema.get("anyOf", [schema]))


def no_field(name: str, known: Collection[str], otherwise: str) -> str:
    """A sentence that there is no field `name`, with a hint which of the fields `known` may be meant.

    `otherwise` takes the hint's place where no field is like it.
    """
    if name.lower() in CARD:
        hint = " The card is hardware=NAME; `harness hardware` lists the names."
    elif here := NAMED_ELSEWHERE.get(name.lower()):
        hint = f" Here it is {here}: give {accepted_values(here)}."
    elif name in BESIDE:
        hint = " It is an argument of some questions, given beside the recipe's fields."
    else:
        hint = nearest(shortened(name), [*known, "hardware"])
    return f"there is no field {shortened(name)}.{hint or otherwise}"


def shortened(text: str) -> str:
    """`text` on one line, cut to what a message can hold."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_SHOWN else text[:LONGEST_SHOWN] + "..."


def _sentence(name: str, problem: Any, fields: Mapping[str, Any]) -> str:
    """What is wrong with the field `name`: `problem` is an entry of pydantic's `errors()`."""
    known = list(Recipe.model_fields)
    if problem["type"] == "extra_forbidden":
        return no_field(name, known, f" The fields are {', '.join(known)}.")
    if problem["type"] == "missing":
        return f"the field {name} is missing; write for example {name}: llama-3.2-1b."
    value = fields[name]
    text = shortened(shown(value))
    reason = f" ({problem['ctx']['error']})" if problem["type"] == "value_error" else ""
    schema = recipe_schema()["properties"][name]
    choices: list[str] = schema.get("enum") or schema.get("items", {}).get("enum") or []
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    wrong = [item for item in items if item not in choices]
    suggestion = _suggested(name, str(wrong[0]), choices) if wrong and choices else ""
    if schema.get("type") == "integer" and (thousands := _THOUSANDS.fullmatch(text)):
        suggestion = f" Did you mean {1024 * int(thousands[1])}?"
    return f"{name}: {text} is not possible{reason}; give {accepted_values(name)}.{suggestion}"


def _suggested(name: str, value: str, choices: Collection[str]) -> str:
    """A hint what to write in the place of a wrong value, or that harness does not have it; may be empty."""
    known = NOT_HERE.get(name, {}).get(value.lower().replace("-", "_"))
    if known is None:
        return nearest(value, choices)
    return f" {shortened(value)} is {known}" + ("." if ":" in known else ", which harness does not have.")


def _in_words(schema: Mapping[str, Any]) -> str:
    """The values that a part of a JSON Schema accepts, in words."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    match schema["type"]:
        case "boolean":
            return "true or false"
        case "array":
            items = schema["items"]
            names = "numbers" if items["type"] == "integer" else "names"
            return f"a list of {names if 'enum' not in items else 'any of ' + ', '.join(items['enum'])}"
        case "integer" | "number" as kind:
            bounds = [
                f"{words} {schema[key]:,}"
                for key, words in (
                    ("minimum", "of at least"),
                    ("exclusiveMinimum", "greater than"),
                    ("exclusiveMaximum", "below"),
                )
                if key in schema
            ]
            return " ".join(["a whole number" if kind == "integer" else "a number", " and ".join(bounds)])
        case "string":
            return "text"
        case "object":
            return "a mapping of names to values"
        case kind:
            return kind
