"""Where the bytes and the milliseconds of a single-GPU fine-tuning recipe go.

Three independent answers to one question: `napkin` (closed form), `simulate` (the real training
step on shape-only tensors) and `measure` (the real training step on a device).
"""

from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "HarnessCallback": ("harness.loops", "HarnessCallback"),
    "HarnessLightningCallback": ("harness.loops", "HarnessLightningCallback"),
    "watch": ("harness.loops", "watch"),
}
"""Where each name is found when it is first used: module and attribute."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
