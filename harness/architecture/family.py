"""The defaults of what a family's config.json leaves out, as the installed transformers has them.

The configuration classes of transformers have a default for every field, mostly a literal. These are read
from the source, since importing a class imports torch, which takes seconds.
"""

import ast
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

FOLDERS = {"openai-gpt": "openai"}
"""The folders in transformers/models of families whose folder has another name than the family."""


@cache
def family_defaults(family: str) -> dict[str, Any]:
    """The literals in the body of the configuration class of `family` (a `model_type`): fields with their
    defaults, `attribute_map` (other names of fields) and `base_model_tp_plan` (names of layers).

    Empty for a family that the installed transformers does not have.
    """
    for node in ast.walk(ast.parse(family_source(family, "configuration") or "")):
        if isinstance(node, ast.ClassDef):
            values = _literals(node)
            if values.get("model_type") == family:
                return values
    return {}


def family_source(family: str, part: Literal["configuration", "modeling"]) -> str | None:
    """The Python source of the family's configuration or models; None for a family that is not installed."""
    module = FOLDERS.get(family, family.replace("-", "_"))
    for name in dict.fromkeys((module, module.removesuffix("_text"))):
        path = models_folder() / name / f"{part}_{name}.py"
        if name.isidentifier() and path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def models_folder() -> Path:
    """The folder of transformers' families, found without importing transformers."""
    spec = find_spec("transformers")
    return Path(spec.origin or "").parent / "models" if spec else Path()


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    """The names in a class' body that a literal is assigned to, with its value."""
    values: dict[str, Any] = {}
    for line in node.body:
        match line:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                with suppress(ValueError):  # no literal, but computed, as a sum or a list of layers
                    values[name] = ast.literal_eval(value)
            case _:
                pass
    return values
