"""The failures a user can cause or meet, each with the exit status the command line gives it."""

import difflib
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

_PASSWORD_IN_URL = re.compile(r"(\w:/{1,2})[^\s/@]*@")
_QUERY_OF_URL = re.compile(r"(\w:/{1,2}[^\s?]*\?)\S+")
LONGEST_MESSAGE = 2000


def printable(text: str) -> str:
    """`text` with every character that no terminal prints (or that one obeys) spelled, as in \\x1b.

    Lines and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


class HarnessError(Exception):
    """A failure explained in one paragraph: what, where, and what to do about it.

    Messages quote files and end up in terminals and logs: the user name, password and query of a URL are left
    out, what no terminal prints (or obeys) is spelled, and what would fill the screen is cut.
    """

    exit_status = 1

    def __init__(self, message: str) -> None:
        message = _QUERY_OF_URL.sub(r"\1...", _PASSWORD_IN_URL.sub(r"\1...@", message))
        if len(message) > LONGEST_MESSAGE:  # in the middle: the reason and the fix come last
            message = f"{message[: LONGEST_MESSAGE // 2]}...{message[-LONGEST_MESSAGE // 2 :]}"
        super().__init__(printable(message))


class InputError(HarnessError):
    """The recipe, a file or an argument is wrong, or the recipe cannot work on this machine."""

    exit_status = 2


class CannotDivide(InputError):
    """The model, or this PyTorch, is one that the recipe's engine cannot divide among ranks."""


class MissingDependency(InputError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str | None, needed_for: str) -> None:
        install = f"pip install 'finetune-harness[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{needed_for} needs the package {package}, which is not installed. Run: {install}")


@contextmanager
def needed(package: str, extra: str | None, needed_for: str) -> Generator[None]:
    """Inside, an import that fails raises MissingDependency."""
    try:
        yield
    except ImportError:
        raise MissingDependency(package, extra, needed_for) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: Python's, torch's on a GPU, torch's on the CPU."""
    # by name: this module imports no torch, whose CPU allocator raises a plain RuntimeError
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"MemoryError", "OutOfMemoryError"}) or "can't allocate memory" in str(error)


def first_line(error: object) -> str:
    """The first line of a library's error, and the second if the first ends with a colon; no full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    message = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return message.rstrip(". ")


def nearest(name: str, names: Collection[str], alike: float = 0.6) -> str:
    """A " Did you mean ...?" for a misspelt `name`; empty when none of `names` is `alike`, of 1."""
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=alike)
    return f" Did you mean {near[0]}?" if near else ""


def wrong_value(wrong: Mapping[str, Any]) -> str:
    """What follows an argument's name where pydantic finds it wrong: the value, if any, and why."""
    given = "" if wrong["type"] in ("missing", "missing_argument") else f"={wrong['input']!r:.80}"
    return f"{given}: {wrong['msg'][0].lower()}{wrong['msg'][1:]}."
