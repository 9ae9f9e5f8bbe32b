"""Where the bytes and the milliseconds of a fine-tuning recipe go.

Independent answers to one question: `napkin` (the textbook's arithmetic), `simulate` (the real training step
on shape-only tensors) and `run` (the real training step on a device).

    import harness

    harness.simulate("smoke", hardware="h100", seq_len=128)

What this module offers is in `__all__`, and is imported when it is first used.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.version import __version__

if TYPE_CHECKING:
    from harness.api import (
        FitAnswer,
        Offers,
        Report,
        fit,
        formula,
        hardware,
        load_profile,
        load_recipe,
        load_snapshot,
        napkin,
        report,
        run,
        shard,
        simulate,
    )
    from harness.errors import HarnessError, InputError, MissingDependency
    from harness.loops import HarnessCallback, HarnessLightningCallback, watch
    from harness.recipe import Recipe
    from harness.step_profile import StepProfile

__all__ = [
    "FitAnswer",
    "HarnessCallback",
    "HarnessError",
    "HarnessLightningCallback",
    "InputError",
    "MissingDependency",
    "Offers",
    "Recipe",
    "Report",
    "StepProfile",
    "__version__",
    "fit",
    "formula",
    "hardware",
    "load_profile",
    "load_recipe",
    "load_snapshot",
    "napkin",
    "report",
    "run",
    "shard",
    "simulate",
    "watch",
]

_OFFERED = {
    "api": "FitAnswer Offers Report fit formula hardware load_profile load_recipe load_snapshot napkin report"
    " run shard simulate",
    "errors": "HarnessError InputError MissingDependency",
    "loops": "HarnessCallback HarnessLightningCallback watch",
    "recipe": "Recipe",
    "step_profile": "StepProfile",
}
_LAZY = {name: f"harness.{package}" for package, names in _OFFERED.items() for name in names.split()}
"""The module in which each name is found when it is first used."""


class _Question(ModuleType):
    """A package that has the name of a question: calling it asks.

    `harness.simulate` is a package and a question. Importing a submodule sets that attribute to the package,
    whoever imports it, so a function in its place would be there or not by what was imported before. The
    attribute is always the package, and the package can be called.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return _found(self.__name__)(*arguments, **options)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """What help() and a notebook's ? show."""
        return _found(self.__name__).__doc__

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(_found(self.__name__))

    def __reduce__(self) -> Any:  # so that a pool of processes can be given the question
        return import_module, (self.__name__,)


class _Harness(ModuleType):
    """This module, which sees what the import of a submodule sets."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LAZY and type(value) is ModuleType:
            value.__class__ = _Question
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    full = f"{__name__}.{name}"
    if find_spec(full) is not None:
        return import_module(full)
    value = globals()[name] = _found(full)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


def _found(full: str) -> Any:
    name = full.rpartition(".")[2]
    return getattr(import_module(_LAZY[name]), name)


sys.modules[__name__].__class__ = _Harness
