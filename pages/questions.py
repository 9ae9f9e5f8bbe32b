"""The commands of docs/questions.md and docs/ten-questions.md and what they print, from
docs/data/questions.json, which `python -m benchmarks.questions` writes.

python -m pages.questions            write them
python -m pages.questions --check    fail if they are not so
"""

import json
import sys
from pathlib import Path

from benchmarks.questions import QUESTIONS, RESULTS, ROOT, Question, script
from pages.parts import with_parts, write_or_check


def part(question: Question, shown: str) -> str:
    """Markdown: the script that is asked about, the commands, and what they print."""
    commands = question.commands
    own = f"```python\n{script(question)}```\n\n" if question.script else ""
    return f"{own}```\n{chr(10).join(commands)}\n```\n\n```\n{shown}\n```\n"


def main(check: bool) -> None:
    """Write the parts, or compare them."""
    shown = json.loads(RESULTS.read_bytes())["shown"]
    written: dict[Path, str] = {}
    for name in sorted({question.page for question in QUESTIONS.values()}):
        page = ROOT / "docs" / f"{name}.md"
        asked = {each: question for each, question in QUESTIONS.items() if question.page == name}
        parts = {each: part(question, shown[each]) for each, question in asked.items()}
        written[page] = with_parts(page, parts)
    write_or_check(written, "pages.questions", check=check)


if __name__ == "__main__":
    main("--check" in sys.argv[1:])
