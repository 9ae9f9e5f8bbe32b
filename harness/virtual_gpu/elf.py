"""The functions that a shared library exports, read from its ELF tables: where gcc is, nm need not be."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_DYNSYM, _FUNCTION, _GLOBAL, _WEAK = 11, 2, 1, 2
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


def exported_functions(library: Path) -> set[str]:
    """Names of the functions that a 64-bit ELF library defines for others. Raises ValueError for other
    files."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:5] != b"\x7fELF\x02":
            raise ValueError(f"{library} is no 64-bit ELF library")
        (first,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        sections: list[tuple[int, ...]] = [
            _SECTION.unpack_from(data, first + size * number) for number in range(count)
        ]
        names: set[str] = set()
        for section in sections:
            if section[1] != _DYNSYM:
                continue
            strings = sections[section[6]][4]
            for offset in range(section[4], section[4] + section[5], _SYMBOL.size):
                name, info, _, defined_in, _, _ = _SYMBOL.unpack_from(data, offset)
                if info & 15 == _FUNCTION and info >> 4 in (_GLOBAL, _WEAK) and defined_in:
                    names.add(data[strings + name : data.find(b"\0", strings + name)].decode())
        return names
