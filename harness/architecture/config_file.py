"""A model's config.json, read and checked before transformers builds from it. Imports no torch."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.system import is_object, read_whole, unrepeated

MAX_CONFIG_BYTES = 1_000_000
LARGEST_COUNT = 2**31 - 1
"""The largest size that a config may give: kernels count in 32 bits."""
MOST_LAYERS = 1_000
"""The most layers that a config may give. A model is built, and its step simulated, layer by layer, and the
deepest published model has 1,000."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Names of the number of layers."""
EXPERTS = ("num_local_experts", "num_experts_per_tok")
COUNTS = (
    *("vocab_size", "hidden_size", "n_embd", "intermediate_size", "head_dim"),
    *LAYERS,
    *("num_attention_heads", "n_head", "num_key_value_heads"),
    *EXPERTS,
)
"""Fields that are counts in every family that has them, or in some a list with a count for each layer."""


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises InputError naming the file and what is wrong with it."""
    try:
        content = read_whole(path, MAX_CONFIG_BYTES)
        config = json.loads(content, object_pairs_hook=lambda pairs: _with_special_floats(unrepeated(pairs)))
    except OSError as error:
        advice = " Give a config.json, not weights." if error.errno == errno.EFBIG else ""
        raise InputError(f"model: {path} cannot be read: {error.strerror}.{advice}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"model: {path} is not JSON: {error}. Give a config.json.") from None
    if not is_object(config):
        raise InputError(f"model: {path} holds no config: it must be a JSON object with a model_type.")
    return config


def _with_special_floats(parsed: dict[str, Any]) -> Any:
    """The object as it is, or the float that it means: transformers writes {"__float__": "Infinity"} for
    numbers that JSON lacks."""
    if parsed.keys() == {"__float__"} and parsed["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(parsed["__float__"])
    return parsed


def checked_count(origin: str, name: str, value: Any, least: int, most: int) -> int:
    """`value`, if it is a whole number from `least` to `most`. Else raises InputError naming the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(
            f"model: {origin}: {name} is {value!r:.60}; it must be a whole number of at least {least} and at "
            f"most {most:,}."
        )
    return value


def check_counts(config: Mapping[str, Any], origin: str) -> None:
    """Raise InputError, naming `origin`, the field and its value, for a size that no model can have.

    transformers builds some such models all the same, and fails in the first step.
    """
    for name in COUNTS:
        value = config.get(name)
        if value is None or isinstance(value, list | dict):
            continue
        least = 0 if name in EXPERTS else 1  # a family with experts also has models without any
        checked_count(origin, name, value, least, MOST_LAYERS if name in LAYERS else LARGEST_COUNT)
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise InputError(
            f"model: {origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}."
        )
