"""YAML as a recipe needs it: safe, without YAML 1.1's surprises, every failure one sentence.

Differences from PyYAML's safe loader: plain scalars follow YAML 1.2 (3e-4 is a number, 010 is not
eight, `no` is text), a repeated key is an error, and so are a tag and an alias (with aliases a small file
can expand to gigabytes).
"""

# yaml's readers have no types.
# pyright: basic
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from harness.errors import InputError
from harness.system.files import read_whole
from harness.system.strict_json import is_object

MAX_FILE_BYTES = 1_000_000
MAX_NODES = 10_000
"""The most names and values in a file; the longest recipe has 80."""


class _Loader(yaml.SafeLoader):
    """Reads the YAML that this module's docstring describes."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # without YAML 1.1's

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._nodes_left = MAX_NODES

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self._nodes_left -= 1
        if self._nodes_left < 0:
            problem = f"there are more than {MAX_NODES:,} names and values before here"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        problem = "aliases (*name) are not accepted" if isinstance(event, yaml.AliasEvent) else None
        if getattr(event, "tag", None) is not None:
            problem = "tags (!name) are not accepted"
        if isinstance(event, yaml.ScalarEvent) and re.search(r"[\ud800-\udfff]", event.value):
            problem = "half a surrogate pair is not text"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                problem = "a key must be a name"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that reads as something else by YAML 1.1 or by the rules below."""


# The core schema of YAML 1.2 (chapter 10.3), with 8_192; integers with leading zeros or absurdly many digits
# stay text, which pydantic reads.
_NUMBER = r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
_NO_NUMBER = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]{0,40})", list("-+0123456789")),
    ("float", f"{_NUMBER}|{_NO_NUMBER}", list("-+0123456789.")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def parse_yaml(text: str, origin: str) -> Any:
    """The value of the YAML `text`, None if empty. Raises InputError naming `origin`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  # the strict one above
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(
            f"{origin} cannot be read as YAML: {where}{error.problem or error.context}. "
            "Write one `name: value` a line, and quote text that holds special characters."
        ) from None
    except yaml.reader.ReaderError as error:
        raise InputError(
            f"{origin} cannot be read as YAML: character {error.position + 1} is not printable. Remove it."
        ) from None
    except RecursionError:
        raise InputError(f"{origin} nests lists too deeply. Write one `name: value` a line.") from None


def to_yaml(fields: Mapping[str, Any]) -> str:
    """`fields` as YAML, in their order. parse_yaml reads equal values back."""
    return yaml.dump(dict(fields), Dumper=_Dumper, sort_keys=False)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The `name: value` pairs of the YAML file at `path`; `what` is a noun for it in messages.

    Raises InputError for a missing, unreadable, binary, empty or huge file, a folder, and no mapping.
    """
    try:
        content = read_whole(path, MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(
            f"cannot read the {what} {path}: {error.strerror}. Give a {what} in a .yaml file."
        ) from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InputError(f"{path} is a binary file where a {what} belongs. Give a YAML text file (UTF-8).")
    value = parse_yaml(text, str(path))
    if value is None:
        raise InputError(f"{path} is empty where a {what} belongs. Write one `name: value` a line.")
    if not is_object(value):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise InputError(f"{path} holds {kind} where a {what} belongs. Write one `name: value` a line.")
    return value
