"""The folders that may be read, and which of them a path is in, when all its links are followed."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import InputError
from harness.recipe import shortened

MOST_ENTRIES = 20_000
"""Files and folders that are looked at in one answer."""
LONGEST_PATH = 4096


class Folders:
    """What a server reads. A path outside is refused with the same words whether it exists or not.

    Links are followed before a path is judged. Whoever can change the folders while they are read is trusted.
    """

    def __init__(self, folders: Sequence[Path], brought: Path) -> None:
        """`brought`: the recipes and models that harness brings. Raises InputError for what is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise InputError(
                    f"{folder} is no folder. Give folders of runs, profiles, snapshots and recipes."
                )
        self.roots = tuple(dict.fromkeys(folder.resolve() for folder in folders))
        self._readable = (*self.roots, brought.resolve())

    def inside(self, text: str, *bases: Path) -> Path:
        """The file or folder of that path, absolute or as seen from one of `bases` (default: the folders).

        Raises InputError unless it, and all that lies in a folder, is in the folders.
        """
        if 0 < len(text) <= LONGEST_PATH and "\0" not in text:
            for base in bases or self.roots:
                real = Path(os.path.realpath(base / text))  # an absolute text is that path
                if self._has(real) and os.path.exists(real):
                    self._refuse_ways_out(real)
                    return real
        known = ", ".join(map(str, self.roots)) or "none"
        raise InputError(
            f"{shortened(text)!r} is not in the folders that this server reads, which are: {known}. "
            "Give a path in them; the tool `files` lists what there is."
        )

    def files(self) -> Iterator[Path]:
        """Every file, not through links to folders, in order; MOST_ENTRIES at most."""
        left = MOST_ENTRIES
        for root in self.roots:
            for folder, folders, names in os.walk(root):
                folders.sort()
                for name in sorted(names):
                    left -= 1
                    if left < 0:
                        return
                    path = Path(folder, name)
                    if self._has(Path(os.path.realpath(path))):
                        yield path

    def _has(self, real: Path) -> bool:
        return any(real.is_relative_to(root) for root in self._readable)

    def _refuse_ways_out(self, folder: Path) -> None:
        """Raises InputError for a folder with a link to somewhere else, or with too many files to tell."""
        left = MOST_ENTRIES
        for inner, folders, names in os.walk(folder):
            for name in (*folders, *names):
                left -= 1
                if left < 0:
                    raise InputError(
                        f"{folder} holds more than {MOST_ENTRIES:,} files. Give one of its folders."
                    )
                if not self._has(Path(os.path.realpath(os.path.join(inner, name)))):
                    raise InputError(
                        f"{folder}: its {shortened(name)!r} is a link to somewhere outside the folders that "
                        "this server reads. Put the file itself there."
                    )
