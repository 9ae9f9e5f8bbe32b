"""The map of the packages of harness/, drawn from what they import: docs/pictures/packages.svg.

python -m pages.map            draw it
python -m pages.map --check    fail if the picture is not of the imports as they are

A package stands one row above the highest package that it imports. A line goes down to each imported package
that is not imported by way of another one, too.
"""

import ast
import sys
from html import escape
from pathlib import Path

from pages.parts import write_or_check
from pages.source import FILES, nodes, tree

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "packages.svg"
BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, COLUMN_WIDTH, LINE_CHARACTERS = 190, 75, 118, 206, 29
STYLE = """
  .box { fill: #f4f6f8; stroke: #5b6770; } .name { font: bold 14px sans-serif; fill: #111; }
  .said { font: 11px sans-serif; fill: #333; } .down { stroke: #8a96a0; fill: none; }
"""


def imports() -> dict[str, set[str]]:
    """By package, the packages of harness/ that its files import."""
    packages = sorted(file.split("/")[0] for file in FILES if file.count("/") == 1 and "__init__" in file)
    found: dict[str, set[str]] = {package: set() for package in packages}
    for file in FILES:
        theirs = found.get(file.split("/")[0], set())
        for node in nodes(file):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            theirs |= {name.split(".")[1] for name in names if name.startswith("harness.")}
    return {package: theirs & set(packages) - {package} for package, theirs in found.items()}


def rows(found: dict[str, set[str]]) -> list[list[str]]:
    """The packages by how far above the ground they stand, the highest row first."""
    height: dict[str, int] = {}

    def height_of(package: str) -> int:
        if package not in height:
            height[package] = 1 + max(map(height_of, found[package]), default=-1)
        return height[package]

    for package in found:
        height_of(package)
    by_row = [[p for p in found if height[p] == n] for n in range(max(height.values()), -1, -1)]
    return [sorted(row) for row in by_row]


def direct(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """`found` without the imports that also go by way of another package."""

    def below(package: str) -> set[str]:
        return found[package].union(*map(below, found[package]))

    return {package: theirs - set().union(*map(below, theirs)) for package, theirs in found.items()}


def charter(package: str) -> str:
    """The first sentence of the package's docstring."""
    said = ast.get_docstring(tree(f"{package}/__init__.py")) or ""
    return said.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")


def folded(text: str, lines: int = 4) -> list[str]:
    """In lines for a box; what does not fit ends in an ellipsis."""
    found = [""]
    for word in text.split():
        if len(found[-1]) + len(word) >= LINE_CHARACTERS:
            found.append("")
        found[-1] = f"{found[-1]} {word}".strip()
    return found if len(found) <= lines else [*found[: lines - 1], f"{found[lines - 1]} …"]


def svg() -> str:
    """The picture."""
    found = imports()
    levels = rows(found)
    width = max(map(len, levels)) * COLUMN_WIDTH + 20
    place = {
        package: ((width - len(row) * COLUMN_WIDTH) / 2 + n * COLUMN_WIDTH + 10, 10 + level * ROW_HEIGHT)
        for level, row in enumerate(levels)
        for n, package in enumerate(row)
    }
    height = len(levels) * ROW_HEIGHT - ROW_HEIGHT + BOX_HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>The packages of harness, and what each imports</title><style>{STYLE}</style>",
    ]
    for package, theirs in sorted(direct(found).items()):
        for other in sorted(theirs):
            (x, y), (to_x, to_y) = place[package], place[other]
            x, to_x, y = x + BOX_WIDTH / 2, to_x + BOX_WIDTH / 2, y + BOX_HEIGHT
            bend = (to_y - y) / 2
            parts.append(
                f'<path class="down" d="M{x:g} {y:g}C{x:g} {y + bend:g} '
                f'{to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}"/>'
            )
    for package, (x, y) in place.items():
        parts.append(
            f'<rect class="box" x="{x:g}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
        )
        parts.append(f'<text class="name" x="{x + 8:g}" y="{y + 17}">{package}</text>')
        for n, line in enumerate(folded(charter(package))):
            parts.append(f'<text class="said" x="{x + 8:g}" y="{y + 31 + 13 * n}">{escape(line)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    write_or_check({PICTURE: svg()}, "pages.map", check="--check" in sys.argv[1:])
