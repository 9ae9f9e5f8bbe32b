"""Names with an underscore that harness/ takes from other libraries: one list, private_names.toml, kept true.

A new one fails here until it is argued there; one that is gone fails until its entry is.
"""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from pages.source import FILES, nodes

LIST = Path(__file__).with_name("private_names.toml")

PUBLIC = ("_asdict", "_replace", "_fields", "_make", "_exit")
"""Documented all the same: a NamedTuple's methods, which no field can be called, and os._exit."""
KEYS = {"name", "of", "where", "what", "why", "tried", "breaks"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1 and name not in PUBLIC


def defined(nodes: Iterable[ast.AST]) -> set[str]:
    """What a file defines itself: functions, classes, names and attributes that it assigns."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def taken(nodes: Iterable[ast.AST], here: set[str], everywhere: set[str]) -> Iterator[str]:
    """The private names that a file takes from a library: attributes, imports, and names in strings.

    `here` is what the file defines, `everywhere` what any file does. Operators (torch.ops.aten._name) are no
    attributes of Python's, and so not meant.
    """
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            ours = everywhere if is_self(node.value) else set() if of_super else here
            if node.attr not in ours and "aten" not in ast.unparse(node.value).split("."):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("harness."):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            yield from filter(is_private, names)
        elif isinstance(node, ast.JoinedStr):  # f"{module}._name", what is patched
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield from (part[1:] for part in map(str, parts) if part[:1] == "." and part[1:].isidentifier())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            path = node.value.split(".")
            if len(path) > 1 and path[0] != "aten" and all(map(str.isidentifier, path)):
                yield from filter(is_private, path)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            if node.func.id in ("getattr", "hasattr", "setattr", "replaced") and isinstance(
                node.args[1], ast.Constant
            ):
                yield from filter(is_private, [str(node.args[1].value)])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "patch.object":
            yield from filter(is_private, [str(getattr(node.args[1], "value", ""))])


@cache
def found() -> dict[str, set[str]]:
    """By private name of a library: the packages of harness/ that use it."""
    own = {file: defined(nodes(file)) for file in FILES}
    everywhere = set().union(*own.values())
    uses: dict[str, set[str]] = defaultdict(set)
    for file in FILES:
        for name in taken(nodes(file), own[file], everywhere):
            if is_private(name):
                uses[name].add(file.split("/")[0])
    return uses


def listed() -> list[dict[str, str | list[str]]]:
    return tomllib.loads(LIST.read_text(encoding="utf-8"))["private"]


def test_every_private_name_is_in_the_list():
    known = {str(entry["name"]): {*entry["where"]} for entry in listed()}
    for name, packages in found().items():
        assert name in known, (
            f"harness/ ({', '.join(sorted(packages))}) uses {name} of another library. Use a public name, or "
            f"add to {LIST.name} a [[private]] entry with {', '.join(sorted(KEYS))}"
        )
        assert packages == known[name], f"{name} is used in {sorted(packages)}: set its `where` to that"


def test_every_entry_is_used():
    assert {str(entry["name"]) for entry in listed()} - found().keys() == set()


def test_the_list_is_complete_and_in_order():
    names = [str(entry["name"]) for entry in listed()]
    assert names == sorted(set(names))
    for entry in listed():
        assert entry.keys() == KEYS, entry["name"]
        assert all(entry.values()), entry["name"]


def test_the_looking_sees():
    source = """
import torch
from torch._a import b
from library import _c
class Own(torch.Tensor):
    def _mine(self): return super()._d(), self._mine(), self._e
def _ours(other): return other._f, torch.ops.aten._operator, hasattr(other, "_g"), "torch.x._h", f"{other}._i"
"""
    every = [*ast.walk(ast.parse(source))]
    assert {*taken(every, defined(every), defined(every))} == {f"_{letter}" for letter in "acdefghi"}
