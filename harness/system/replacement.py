"""Replaces names of other libraries, or variables of the environment, for a while."""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any, NamedTuple

from harness.errors import InputError
from harness.system.versions import installed_version

_NOT_THERE = object()


class Replacement(NamedTuple):
    """A name of a library, and what it stands for instead."""

    target: str
    """The full path, as torch.cuda.is_available."""
    value: Any
    why: str
    """What the library would do without the replacement where there is no GPU."""


def nothing(*_: Any, **__: Any) -> None:
    """A function without effect, in place of one that has nothing to do where tensors have no contents."""


@contextmanager
def all_replaced(replacements: Iterable[Replacement]) -> Generator[None]:
    """Inside the `with` block, all of them hold. Raises InputError for a name that the library lacks."""
    with ExitStack() as stack:
        for target, value, why in replacements:
            place, _, name = target.rpartition(".")
            try:
                owner = resolve_name(place)
                getattr(owner, name)
            except (ImportError, AttributeError):
                library = target.partition(".")[0]
                raise InputError(
                    f"{library} {installed_version(library)} has no {target}, which the simulation replaces "
                    f"({why}). Install a release of {library} that pyproject.toml allows."
                ) from None
            stack.enter_context(replaced(owner, name, value))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """Inside the `with` block, `owner.name` is `value`, even if `owner` had no such attribute before."""
    before: Any = owner.__dict__.get(name, _NOT_THERE)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _NOT_THERE:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def in_environment(variables: Mapping[str, str]) -> Generator[None]:
    """Inside the `with` block, the environment has these variables too, for processes that are started."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
