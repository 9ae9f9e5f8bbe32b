"""Names of other libraries that a simulation replaces while it runs: which, by what, and why."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from pkgutil import resolve_name
from typing import Any, NamedTuple

from harness.errors import InputError
from harness.system.versions import installed_version

_NOT_THERE = object()


class Replacement(NamedTuple):
    """One name of a library, by its full path, and what stands there instead."""

    target: str
    value: Any
    why: str
    """What the library does otherwise where there is no GPU."""


def nothing(*_: Any, **__: Any) -> None:
    """In the place of what has no work to do on shapes, or nobody to do it for."""


@contextmanager
def all_replaced(replacements: Iterable[Replacement]) -> Generator[None]:
    """All of them while inside. Raises InputError for a name that the library has no more."""
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
    """`owner.name` is `value` while inside, whether it was there or not."""
    before: Any = owner.__dict__.get(name, _NOT_THERE)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _NOT_THERE:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
