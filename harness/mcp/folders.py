"""The folders that the server may read, and the check that a path with its links followed is in them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import InputError
from harness.recipe import shortened

MOST_ENTRIES = 20_000
"""The most files and folders that are looked at for one answer."""
LONGEST_PATH = 4096
"""The most characters of a path."""


class Folders:
    """The folders that a server reads. A path outside is refused in the same words whether it exists or not.

    Links are followed before a path is judged. Whoever can change the folders while they are read is trusted.
    """

    def __init__(self, folders: Sequence[Path], brought: Path) -> None:
        """`brought` is the folder with harness's own recipes and models, which can be read and is not listed.
        Raises InputError for what is no folder."""
        for folder in folders:
            if not folder.is_dir():
                raise InputError(
                    f"{folder} is no folder. Give folders of runs, profiles, snapshots and recipes."
                )
        self.roots = tuple(dict.fromkeys(folder.resolve() for folder in folders))
        self._readable = (*self.roots, brought.resolve())

    def inside(self, text: str, *bases: Path) -> Path:
        """The real path of the file or folder `text`, which is absolute or relative to one of `bases`
        (default: the folders).

        Raises InputError unless it is in the folders and, of a folder, everything in it is too.
        """
        if 0 < len(text) <= LONGEST_PATH and "\0" not in text:
            for base in bases or self.roots:
                real = Path(os.path.realpath(base / text))  # the base is dropped if `text` is absolute
                if self._has(real) and os.path.exists(real):
                    self._refuse_ways_out(real)
                    return real
        known = ", ".join(map(str, self.roots)) or "none"
        raise InputError(
            f"{shortened(text)!r} is not in the folders that this server reads, which are: {known}. "
            "Give a path in them; the tool `files` lists what there is."
        )

    def files(self) -> Iterator[Path]:
        """Every file in the folders in order, at most MOST_ENTRIES. Links to folders are not entered."""
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
        """Raise InputError for a folder that holds a link to a place outside, or too many files to check."""
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
