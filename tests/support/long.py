"""What `make test` leaves to `make test-long` of a parametrized test: more of what its others hold."""

from collections.abc import Collection, Container, Mapping
from typing import Any

import pytest

long = pytest.mark.long
"""For a file of which conftest's LONG does not speak; whoever imports this module is collected for it."""


def but_for(usual: Container[str], values: Mapping[str, Any]) -> list[Any]:
    """Parameters by id, of which all are long but those in `usual`."""
    return [
        pytest.param(value, id=name, marks=() if name in usual else long) for name, value in values.items()
    ]


def alone(names: Collection[str]) -> set[str]:
    """Of names such as "lora" and "lora fp16" or "lora, clipped" those that are no other one with more."""
    begins = tuple(f"{name}{more}" for name in names for more in " ,")
    return {name for name in names if not name.startswith(begins)}
