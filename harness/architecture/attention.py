"""The attention of a recipe that does not set it: sdpa, unless transformers' class of the model has none.

The source of each family says so (`_supports_sdpa`). It is read and not imported, which would import torch
and take seconds.
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
"""Lines of a family's source: the beginning of a class with its bases, or what it says about sdpa."""
_MAPPING = re.compile(r"^MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)^\)", re.MULTILINE | re.DOTALL)
_ENTRY = re.compile(r"\(\"([\w-]+)\", \"(\w+)\"\)")


def with_attention(recipe: Recipe) -> Recipe:
    """`recipe` as it is if it sets `attention` or its model has sdpa; else with `attention: eager`, which a
    sentence on stderr says once.
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
    """Whether transformers' causal language model of `family` (a `model_type`) has sdpa; None for a family
    that is not installed.
    """
    source = family_source(family, "modeling")
    model_class = _classes().get(family)
    if source is None or model_class is None:
        return None
    bases: dict[str, list[str]] = {}
    supports: dict[str, bool] = {}
    name = ""
    for found in _LINES.finditer(source):
        if found[1]:
            name = found[1]
            bases[name] = [base.strip() for base in found[2].split(",")]
        else:
            supports[name] = found[3] == "True"
    classes = [model_class]  # and its bases, nearest first
    for name in classes:
        if name in supports:
            return supports[name]
        classes += [base for base in bases.get(name, []) if base not in classes]
    return False  # as PreTrainedModel, the base of all, says


@cache
def _classes() -> dict[str, str]:
    """The name of transformers' class of causal language models, by family."""
    path = models_folder() / "auto" / "modeling_auto.py"
    found = _MAPPING.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return dict(_ENTRY.findall(found[1])) if found else {}
