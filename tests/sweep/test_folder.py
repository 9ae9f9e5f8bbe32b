"""What the answers kept of a sweep are answers of: the code that gave them is part of the question."""

import shutil
from pathlib import Path

import pytest

from harness.sweep import folder


def test_other_code_anywhere_is_another_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of a file in any folder, a new file, a file of another name."""
    code = tmp_path / "harness"
    shutil.copytree(folder.PACKAGE, code, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    monkeypatch.setattr(folder, "PACKAGE", code)
    digest = folder._code_digest.__wrapped__  # without what it remembers
    seen = {digest()}
    one_of_each = {file.parent: file for file in sorted(code.rglob("*.py"))}
    assert len(one_of_each) > 40
    for file in one_of_each.values():
        file.write_bytes(file.read_bytes() + b"#")
        seen.add(digest())
    (code / "napkin" / "new.py").touch()
    seen.add(digest())
    (code / "napkin" / "new.py").rename(code / "napkin" / "old.py")
    seen.add(digest())
    assert len(seen) == 1 + len(one_of_each) + 2
