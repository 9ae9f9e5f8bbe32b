# For the type checker only. transformers' own __init__ imports every model it has, 2,600 files, and its
# types say little: with them `make check` takes twice as long.
from typing import Any

def __getattr__(name: str) -> Any: ...
