"""The commands of docs/questions.md and what they print, from docs/data/questions.json, which
`python -m benchmarks.questions` writes.

python -m pages.questions            write them
python -m pages.questions --check    fail if they are not so
"""

from __future__ import annotations

import json
import sys

from benchmarks.questions import QUESTIONS, RESULTS, ROOT
from pages.parts import with_parts, write_or_check

PAGE = ROOT / "docs" / "questions.md"


def part(commands: tuple[str, ...], shown: str) -> str:
    """Markdown: the commands, and what they print."""
    return f"```\n{chr(10).join(commands)}\n```\n\n```\n{shown}\n```\n"


def main(check: bool) -> None:
    """Write the parts, or compare them."""
    shown = json.loads(RESULTS.read_bytes())["shown"]
    parts = {name: part(question.commands, shown[name]) for name, question in QUESTIONS.items()}
    write_or_check({PAGE: with_parts(PAGE, parts)}, "pages.questions", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
