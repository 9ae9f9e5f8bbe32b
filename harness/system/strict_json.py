"""Reads JSON of bounded size whose values can be written as JSON again. Imports no torch.

Values are counted before the first one is made. A repeated key, half of a surrogate pair, NaN, infinity, and
an integer of more than 128 bits are refused.
"""

import json
import re
from typing import Any, TypeGuard

MAX_VALUES = 2**18
"""The most values of a document without a trace and without losses. The largest one has a few thousand."""
LARGEST_INTEGER = 2**128 - 1
"""The largest integer that is read: far beyond any count, and far below what a float can hold."""


class TooManyValues(ValueError):
    """A document that would make more values than it may."""


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a parsed value is an object: a dict with strings as keys and any values."""
    return isinstance(value, dict)


def is_array(value: object) -> TypeGuard[list[Any]]:
    """Whether a parsed value is a list, with any elements."""
    return isinstance(value, list)


_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(content: bytes | str, max_values: int = MAX_VALUES) -> Any:
    """The value of the JSON text `content`.

    Raises ValueError where `content` is no JSON or no Unicode text, repeats a key or has a number out of
    range; TooManyValues where it could have more than `max_values` values, counted by commas and brackets
    (those within strings too); and RecursionError where it nests too deep.
    """
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    if 1 + sum(map(text.count, ",[{")) > max_values:
        raise TooManyValues(f"it holds more than {max_values:,} values")
    value = json.loads(
        text,
        object_pairs_hook=unrepeated,
        parse_int=_integer,
        parse_float=_number,
        parse_constant=_refuse_constant,
    )
    if _HALF.search(text):  # "\ud800" alone becomes a str that cannot be encoded
        json.dumps(value, ensure_ascii=False).encode()
    return value


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys and values. Raises ValueError for a repeated key."""
    parsed = dict(pairs)
    if len(parsed) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the key {twice!r:.60} is given twice")
    return parsed


def _integer(digits: str) -> int:
    # 39 digits and a sign at most: int() is slow for long texts, and refuses thousands of digits
    value = int(digits) if len(digits) <= 40 else LARGEST_INTEGER + 1
    if abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{digits[:20]}... is an integer of more than 128 bits")
    return value


def _number(digits: str) -> float:
    value = float(digits)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{digits[:20]} is a number too large")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")
