"""A page of the guide with parts that results write, each between two comments of its name."""

import sys
from collections.abc import Mapping
from pathlib import Path

from harness.system import write_whole

ROOT = Path(__file__).resolve().parents[1]


def with_parts(page: Path, parts: Mapping[str, str]) -> str:
    """The text of `page` with these parts in it. Exits where it has no place for one."""
    text = page.read_text(encoding="utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            sys.exit(f"docs/{page.name} has no part {begin.strip()} … {end.strip()}")
        text = f"{before}{begin}\n{part}\n{end}{after}"
    return text


def write_or_check(written: Mapping[Path, str], module: str, *, check: bool) -> None:
    """Write each file, or exit where one is not as `python -m module` would write it."""
    for path, text in written.items():
        if not check:
            write_whole(path, text)
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            sys.exit(f"{where} is not of the results. Run: python -m {module}")
