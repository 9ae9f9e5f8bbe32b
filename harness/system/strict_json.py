"""JSON as text that can be written again: UTF-8, and no half of a surrogate pair. Imports no torch."""

from __future__ import annotations

import json
import re
from typing import Any

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(content: bytes | str) -> Any:
    """The value that `content` spells.

    Raises ValueError for what is no JSON or no Unicode text, and RecursionError for what nests too deep.
    """
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    value = json.loads(text)
    if _HALF.search(text):  # "\ud800" alone is a str that no file and no terminal takes
        json.dumps(value, ensure_ascii=False).encode()
    return value
