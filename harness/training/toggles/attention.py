"""The toggle `attention`: which implementation runs, and what it needs."""

from __future__ import annotations

from typing import Any


def attention_kernel(model: Any) -> str:
    """The attention implementation the built model uses, as transformers names it."""
    return str(model.config._attn_implementation)
