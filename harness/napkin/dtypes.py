"""Bytes of an element, by dtype."""

from __future__ import annotations

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Bytes of an element."""
