"""Peaks that others measured and published, each with its source: profiles/published/measurements.json."""

import json
from pathlib import Path
from typing import Any

from harness.hardware.hardware import Hardware, find_hardware

FOLDER = Path(__file__).resolve().parents[2] / "profiles" / "published"


def published_cases(source: str = "") -> list[dict[str, Any]]:
    """The cases whose id begins with `source`, in the order of the file."""
    cases = json.loads((FOLDER / "measurements.json").read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["id"].startswith(source)]


def device_of(case: dict[str, Any]) -> Hardware:
    """The device that the case was measured on."""
    return find_hardware("a100-40gb" if case["id"].startswith("litgpt") else "a100-80gb")
