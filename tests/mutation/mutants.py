"""The mutants of a file: mutmut's operators and three more, each at each place where it applies.

mutmut's own runner leaves out every decorated function (properties, context managers, `no_grad`), and what a
mutant of cosmic-ray costs is a process that imports torch: so only the operators are taken, and run in forks.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_string

from tests.support.places import ROOT

CODE = cst.Module([])
BARE = m.Name() | m.Attribute() | m.Call()
"""Conditions in which mutmut has nothing to turn round."""
NOT_MUTATED = (cst.Annotation, cst.Decorator, cst.Import, cst.ImportFrom, cst.Assert)
"""What says nothing about what the code does, or fails at once when it is changed."""


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    path: str
    """From the root of the checkout."""
    line: int
    was: str
    """The lines that change, in one, without indentation."""
    becomes: str
    source: str
    """The whole file as changed."""
    nth: int = 0
    """How many like it stand above."""

    @property
    def key(self) -> str:
        """The same for as long as these lines and this change are the same, wherever the lines are."""
        return hashlib.sha256(f"{self.path}\n{self.was}\n{self.becomes}\n{self.nth}".encode()).hexdigest()


def mutants_of(path: str) -> list[Mutant]:
    """Every mutant of the file at `path`, from the root. Some do not compile, or say the same."""
    code = (ROOT / path).read_bytes()
    module = MetadataWrapper(cst.parse_module(code), unsafe_skip_copy=True)
    found = _Found()
    module.visit(found)
    mutants: list[Mutant] = []
    like_it: Counter[tuple[str, str]] = Counter()
    for (start, length), line, changed in found.changes:
        source = (code[:start] + changed.encode() + code[start + length :]).decode()
        change = _changed_lines(code.decode(), source)
        mutants.append(Mutant(path, line, *change, source, like_it[change]))
        like_it[change] += 1
    return mutants


def sample_of(mutants: list[Mutant], size: int) -> list[Mutant]:
    """`size` of them, or all: as good as random, and hardly others when a few lines change. Each compiles and
    is another program.
    """
    chosen: list[Mutant] = []
    for mutant in sorted(mutants, key=lambda mutant: mutant.key):
        if len(chosen) < size and _is_another_program(mutant):
            chosen.append(mutant)
    return sorted(chosen, key=lambda mutant: (mutant.path, mutant.line))


def _is_another_program(mutant: Mutant) -> bool:
    try:
        return ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse((ROOT / mutant.path).read_bytes()))
    except SyntaxError:
        return False


class _Found(cst.CSTVisitor):
    """Gathers (start and length in bytes, line, code in its place) of every change."""

    METADATA_DEPENDENCIES = (ByteSpanPositionProvider, PositionProvider)

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[tuple[int, int], int, str]] = []
        self._functions = 0

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        self._functions += isinstance(node, cst.FunctionDef) and attribute == "body"

    def on_leave_attribute(self, original_node: cst.CSTNode, attribute: str) -> None:
        self._functions -= isinstance(original_node, cst.FunctionDef) and attribute == "body"

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, NOT_MUTATED) or _is_text_about_code(node) or _is_only_a_check(node):
            return False
        if not self._functions and _is_type_alias(node):
            return False
        for changed in _changes(node):
            self._change(node, CODE.code_for_node(changed))
        if isinstance(node, cst.If | cst.While | cst.CompIf) and m.matches(node.test, BARE):
            self._change(node.test, f"not {CODE.code_for_node(node.test)}")
        return not isinstance(node, cst.Raise)  # a message is read by people

    def _change(self, node: cst.CSTNode, becomes: str) -> None:
        span: Any = self.get_metadata(ByteSpanPositionProvider, node)
        place: Any = self.get_metadata(PositionProvider, node)
        self.changes.append(((span.start, span.length), place.start.line, becomes))


def _changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if m.matches(node, m.Expr(value=m.Call()) | m.Raise()):
        yield cst.Pass()  # not called, not raised
    if isinstance(node, cst.Raise):
        return
    for kind, operator in mutation_operators:
        if not isinstance(node, kind):
            continue
        changed = list(operator(node))
        if operator is operator_string:
            changed = changed[:1]  # in capitals, and so on: no other question
        if operator is operator_arg_removal and isinstance(node, cst.Call):
            changed = [call for call in changed if _strict(call) == _strict(node)]
        yield from changed


def _strict(call: cst.CSTNode) -> list[str]:
    assert isinstance(call, cst.Call)
    found = [arg for arg in call.args if arg.keyword is not None and arg.keyword.value == "strict"]
    return [CODE.code_for_node(arg.value) for arg in found]


def _is_text_about_code(node: cst.CSTNode) -> bool:
    return m.matches(node, m.Expr(value=m.SimpleString() | m.ConcatenatedString()))


def _is_only_a_check(node: cst.CSTNode) -> bool:
    """`strict=True` of zip, and what only a type checker reads."""
    return m.matches(node, m.Arg(keyword=m.Name("strict")) | m.If(test=m.Name("TYPE_CHECKING")))


def _is_type_alias(node: cst.CSTNode) -> bool:
    value = m.Subscript() | m.BinaryOperation(operator=m.BitOr())
    return m.matches(
        node, m.Assign(targets=[m.AssignTarget(target=m.Name(m.MatchRegex("_?[A-Z][a-z].*")))], value=value)
    )


def _changed_lines(before: str, after: str) -> tuple[str, str]:
    """The lines in which they differ, each side's in one."""
    old, new = before.splitlines(), after.splitlines()
    first = next(n for n, (a, b) in enumerate(zip([*old, None], [*new, None], strict=False)) if a != b)
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    sides = (lines[first : len(lines) - last] for lines in (old, new))
    was, becomes = (" ".join(line.strip() for line in side) for side in sides)
    return was, becomes
