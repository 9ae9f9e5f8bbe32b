"""Which families of models Liger has, which its source says. Importing it would import torch."""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from harness.architecture.config_file import read_config
from harness.architecture.model_id import find_config
from harness.errors import InputError
from harness.system import is_object

_ENTRY = re.compile(r"^    \"([\w-]+)\": apply_liger_kernel_to_\w+,", re.MULTILINE)


def liger_has(model: str) -> bool:
    """Whether Liger has that model of a recipe. True where Liger or the config is not here."""
    try:
        config = read_config(find_config(model))
    except InputError:  # whoever needs the model says it
        return True
    text = config.get("text_config")
    families = {str(part.get("model_type")) for part in (config, text) if is_object(part)}
    return not _families() or bool(families & _families())


@cache
def _families() -> frozenset[str]:
    """The `model_type` of each family; empty where Liger is not installed."""
    found = find_spec("liger_kernel")
    folders = list(found.submodule_search_locations or []) if found else []
    path = Path(*folders[:1], "transformers", "monkey_patch.py")
    return frozenset(_ENTRY.findall(path.read_text(encoding="utf-8")) if folders and path.is_file() else ())
