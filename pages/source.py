"""The Python source of harness/, parsed once for all that look at it: pages, and tests of the whole."""

import ast
from functools import cache
from pathlib import Path

HARNESS = Path(__file__).resolve().parents[1] / "harness"
FILES = {str(path.relative_to(HARNESS)): path for path in sorted(HARNESS.rglob("*.py"))}
"""By path in harness/."""


@cache
def tree(file: str) -> ast.Module:
    """The file's syntax tree."""
    return ast.parse(FILES[file].read_text(encoding="utf-8"))


@cache
def nodes(file: str) -> tuple[ast.AST, ...]:
    """Every node of the file's tree: walking is what takes the time."""
    return tuple(ast.walk(tree(file)))
