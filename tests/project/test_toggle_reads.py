"""A toggle is four edits: who reads its field, and who may compare it with a value, read from the source."""

import ast
from collections.abc import Iterable, Iterator

import pytest

from harness.recipe.fields import Fields
from pages.source import nodes
from pages.toggle_reads import (
    EXCEPTIONS,
    MOST_FILES,
    OWN,
    TOGGLES,
    files,
    follows_from,
    is_recipe,
    readers,
)

STRING_METHODS = ("startswith", "endswith", "removeprefix", "removesuffix", "lower", "split")


def compared(found: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What is compared with a value: by an operator, a method of str, match, or as a key."""
    for node in found:
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in STRING_METHODS:
                yield node.func.value
            elif node.func.attr == "get":
                yield from node.args
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.Subscript):
            yield node.slice


def values_compared(found: Iterable[ast.AST], file: str) -> set[str]:
    """The toggles whose field is compared with a value in a file's nodes."""
    return {
        node.attr
        for node in compared(found)
        if isinstance(node, ast.Attribute) and node.attr in TOGGLES and is_recipe(node.value, file)
    }


@pytest.mark.parametrize("toggle", TOGGLES)
def test_few_files_read_a_toggle(toggle: str):
    found = readers(toggle)
    assert len(found) <= MOST_FILES, found
    argued = {file for name, file in EXCEPTIONS if name == toggle}
    assert {file for file in found if file != OWN[toggle] and not file.startswith("napkin/")} == argued
    assert len(argued) <= 2 or OWN[toggle] not in found
    assert sum(file.startswith("napkin/") for file in found) <= 1, "a toggle has its price in one place"
    touched = {*found, *(f for name, of in follows_from().items() if toggle in of for f in readers(name))}
    assert OWN[toggle] in touched


def test_every_toggle_is_built_somewhere():
    assert OWN.keys() == {*TOGGLES}
    assert len(TOGGLES) == 40


def test_values_of_a_toggle_are_compared_in_its_own_file():
    """Others ask for a property of the recipe, which says what the value means."""
    for file in files():
        if not file.startswith(("recipe/", "napkin/")):
            found = values_compared(nodes(file), file)
            assert {toggle for toggle in found if OWN[toggle] != file} == set(), file


def test_the_looking_sees():
    seen = """
recipe.loss == "a", recipe.adapter.startswith("b"), self._recipe.attention in ("c",), {}[run.recipe.optimizer]
"x" in asked.offload, {}.get(recipe.precision), recipe.max_grad_norm is not None, other.loss == "a"
match recipe.quantization:
    case "nf4": pass
"""
    every = {
        *("loss", "adapter", "attention", "optimizer", "offload", "precision"),
        *("quantization", "max_grad_norm"),
    }
    assert values_compared(ast.walk(ast.parse(seen)), "a.py") == every
    assert sum(bool(values_compared(nodes(file), file)) for file in files()) > 5


def test_properties_say_what_they_follow_from():
    assert follows_from()["optimizer_on_host"] == {"offload"}
    assert follows_from()["scaled"] == {"precision"}
    assert {name for of in follows_from().values() for name in of} <= Fields.model_fields.keys()
