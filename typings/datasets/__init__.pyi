from collections.abc import Iterable, Mapping
from typing import Any

def load_dataset(path: str, *, split: str) -> Iterable[Mapping[str, Any]]: ...
