"""Which attention a recipe has that names none: sdpa, unless the model's class in transformers is without.

transformers says so in the source of each family (`_supports_sdpa`), which is read and not imported: that
would import torch, which takes seconds.
"""

import re
from functools import cache

from harness.architecture.config_file import read_config
from harness.architecture.family import family_source, models_folder
from harness.architecture.model_id import find_config
from harness.errors import InputError
from harness.recipe import Recipe
from harness.system import say_once

_LINES = re.compile(r"^class (\w+)\((.*)\):|^    _supports_sdpa = (True|False)", re.MULTILINE)
_MAPPING = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"\(\"([\w-]+)\", \"(\w+)\"\)")


def with_attention(recipe: Recipe) -> Recipe:
    """`recipe` as it is if it names its attention; else with `attention: eager` where its model has no sdpa,
    which is said once.
    """
    if "attention" in recipe.model_fields_set or not (why := why_no_sdpa(recipe.model)):
        return recipe
    say_once(f"attention: eager: {why}. Write `attention` into the recipe to choose it yourself.")
    return recipe.model_copy(update={"attention": "eager"})


def why_no_sdpa(model: str) -> str:
    """Why that model of a recipe is not to be trained with sdpa; empty where it may be, and for a model whose
    config is not here: whoever needs it says so."""
    try:
        config = read_config(find_config(model))
    except InputError:
        return ""
    family = str(config.get("model_type"))
    if config.get("attn_logit_softcapping") is not None:
        return f"{family} caps its attention scores, which sdpa cannot"
    return f"{family} has no sdpa in this transformers" if has_sdpa(family) is False else ""


@cache
def has_sdpa(family: str) -> bool | None:
    """Whether transformers' causal language model of that family (a `model_type`) has sdpa; None for a family
    whose source is not here.
    """
    source = family_source(family, "modeling")
    made_by = _classes().get(family)
    if source is None or made_by is None:
        return None
    bases: dict[str, list[str]] = {}
    said: dict[str, bool] = {}
    name = ""
    for found in _LINES.finditer(source):
        if found[1]:
            name = found[1]
            bases[name] = [base.strip() for base in found[2].split(",")]
        else:
            said[name] = found[3] == "True"
    waiting = [made_by]
    for name in waiting:
        if name in said:
            return said[name]
        waiting += [base for base in bases.get(name, []) if base not in waiting]
    return False  # as their common base says


@cache
def _classes() -> dict[str, str]:
    """The class that transformers makes of each family as a causal language model."""
    path = models_folder() / "auto" / "modeling_auto.py"
    found = _MAPPING.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return dict(_ENTRY.findall(found[1])) if found else {}
