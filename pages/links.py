"""Checks the guide's links: files and anchors must be there; external addresses are listed, not fetched.

python -m pages.links
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
LINK = re.compile(r"\]\(([^()\s]+)\)")


def broken_links(folder: Path) -> Iterator[str]:
    """One sentence for every link in the folder's pages that leads nowhere."""
    for page in sorted(folder.rglob("*.md")):
        for target in internal_links(page):
            path, _, anchor = target.partition("#")
            leads_to = (page.parent / path).resolve() if path else page
            if not leads_to.is_relative_to(folder.resolve()) or not leads_to.is_file():
                yield f"{page.name}: there is no {target}"
            elif anchor and anchor not in anchors(leads_to):
                yield f"{page.name}: {leads_to.name} has no heading #{anchor}"


def internal_links(page: Path) -> list[str]:
    """Targets of links and pictures that are not on the web."""
    return [target for target in links(page) if "://" not in target]


def external_links(folder: Path) -> set[str]:
    """Addresses on the web."""
    return {target for page in folder.rglob("*.md") for target in links(page) if "://" in target}


def links(page: Path) -> list[str]:
    """Every target, in order, outside of code."""
    return LINK.findall(_without_code(page))


def anchors(page: Path) -> set[str]:
    """The ids that mkdocs gives to the page's headings."""
    headings = re.findall(r"^#+ (.+)$", _without_code(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def _without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


if __name__ == "__main__":
    for address in sorted(external_links(DOCS)):
        print(f"not fetched: {address}")
    broken = list(broken_links(DOCS))
    print("\n".join(broken), file=sys.stderr)
    sys.exit(bool(broken))
