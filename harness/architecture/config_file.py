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
"""Of anything in a config: kernels count in 32 bits."""
MOST_LAYERS = 1_000
"""A model is built, and a step walked through, layer by layer. The deepest published has 1,000."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
EXPERTS = ("num_local_experts", "num_experts_per_tok")
COUNTS = (
    *("vocab_size", "hidden_size", "n_embd", "intermediate_size", "head_dim"),
    *LAYERS,
    *("num_attention_heads", "n_head", "num_key_value_heads"),
    *EXPERTS,
)
"""Fields that are counts in every family that has them (in some, a list of one for each layer)."""


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


def _with_special_floats(found: dict[str, Any]) -> Any:
    """{"__float__": "Infinity"} is how transformers writes the numbers that JSON lacks."""
    if found.keys() == {"__float__"} and found["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(found["__float__"])
    return found


def checked_count(origin: str, name: str, value: Any, least: int, most: int) -> int:
    """`value`, which a field has. Raises InputError naming `origin` and the field for no such count."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(
            f"model: {origin}: {name} is {value!r:.60}; it must be a whole number of at least {least} and at "
            f"most {most:,}."
        )
    return value


def check_counts(config: Mapping[str, Any], origin: str) -> None:
    """Raise InputError naming `origin`, the field and its value for a size that no model can have.

    transformers builds some of them all the same, and fails in the first step.
    """
    for name in COUNTS:
        value = config.get(name)
        if value is None or isinstance(value, list | dict):
            continue
        least = 0 if name in EXPERTS else 1  # a family with experts has members without
        checked_count(origin, name, value, least, MOST_LAYERS if name in LAYERS else LARGEST_COUNT)
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise InputError(
            f"model: {origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {shared}."
        )
