"""What a family's config.json leaves out: the defaults of the transformers that is installed.

Its configuration classes name a default for every field, as literals. They are read from the source, since
importing one imports torch, which takes seconds.
"""

import ast
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

FOLDERS = {"openai-gpt": "openai"}
"""Of families that have another name there."""


@cache
def family_defaults(family: str) -> dict[str, Any]:
    """The literals in the body of the family's configuration class: its fields with their defaults, and also
    `attribute_map` (other names of fields) and `base_model_tp_plan` (names of layers).

    Empty for a family that this transformers does not have.
    """
    for node in ast.walk(ast.parse(family_source(family, "configuration") or "")):
        if isinstance(node, ast.ClassDef):
            values = _literals(node)
            if values.get("model_type") == family:
                return values
    return {}


def family_source(family: str, part: Literal["configuration", "modeling"]) -> str | None:
    """The source of the family's configuration or of its models; None for one that is not here."""
    module = FOLDERS.get(family, family.replace("-", "_"))
    for name in dict.fromkeys((module, module.removesuffix("_text"))):
        path = models_folder() / name / f"{part}_{name}.py"
        if name.isidentifier() and path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def models_folder() -> Path:
    """Where transformers keeps its families. Finding a package does not import it."""
    found = find_spec("transformers")
    return Path(found.origin or "").parent / "models" if found else Path()


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for line in node.body:
        match line:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                with suppress(ValueError):  # computed, as a sum or a list of layers
                    values[name] = ast.literal_eval(value)
            case _:
                pass
    return values
