"""Recipes on disk: find, read, override, list, write. Imports no torch.

A recipe file is YAML and holds only the fields that differ from the defaults; its first line is a
comment that describes it. Paths in it are relative to its own folder, paths in `key=value`
overrides to the current folder.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import InputError, nearest
from harness.recipe.check import BESIDE, CALL, COMMAND_LINE, check_recipe, shortened
from harness.recipe.recipe import Recipe
from harness.system import parse_yaml, read_mapping, recipes_folder, to_yaml

DATA_SUFFIXES = (".txt", ".jsonl", ".ndjson", ".json", ".parquet")
"""Endings by which `data` names a file, so that a missing one is an error here."""


def load_recipe(source: str, overrides: Sequence[str] | Mapping[str, Any] = ()) -> tuple[str, Recipe]:
    """Name and Recipe of `source`, changed by the overrides.

    `source` is a name in the recipes folder, the path of a recipe's file, or a model as the field `model`
    names one: its recipe has the default of every other field. An override is `key=value`, its value YAML, as
    a command gets it; or a field and its value, as a call in Python does. Raises InputError for a missing or
    malformed file, a bad override, a wrong field or an impossible pair.
    """
    if names_model(source):
        name, origin, folder = model_name(source), source, Path.cwd()
        fields: dict[str, Any] = {"model": source}
    else:
        path = _recipe_path(source)
        name, origin, folder = path.stem, str(path), path.resolve().parent
        fields = read_mapping(path, "recipe")
    called = isinstance(overrides, Mapping)
    changed_by = CALL if called else COMMAND_LINE
    changes = overrides if called else _parse_overrides(overrides)
    changes = _with_whole_paths(changes, Path.cwd(), changed_by)
    unchanged = {name: value for name, value in fields.items() if name not in changes}
    unchanged = _with_whole_paths(unchanged, folder, origin)
    return name, check_recipe({**unchanged, **changes}, origin, list(changes), changed_by)


def changed_recipe(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """`recipe` with other values of these fields, checked again. Raises InputError as load_recipe does."""
    changes = _with_whole_paths(overrides, Path.cwd(), CALL)
    # only fields that were set: the model may choose the others. model_copy would check no name and no value
    given = {name: getattr(recipe, name) for name in recipe.model_fields_set}
    return check_recipe({**given, **changes}, "the recipe", list(changes), CALL)


def list_recipes() -> list[tuple[str, str]]:
    """(name, first comment line) of every recipe in the recipes folder, by name."""
    return [(path.stem, _description(path)) for path in sorted(recipes_folder().glob("*.yaml"))]


class CardRecipe(NamedTuple):
    """A recipe in recipes/cards, which fits on a card of `card_gb` GB; its file is MODEL-METHOD-8gb.yaml."""

    name: str
    card_gb: int
    model: str
    method: str
    """full, lora or qlora."""
    description: str


def list_card_recipes() -> list[CardRecipe]:
    """Every recipe in recipes/cards: those of the smallest card first, and those of one card by name."""
    recipes: list[CardRecipe] = []
    for path in (recipes_folder() / "cards").glob("*gb.yaml"):
        model, method, card = path.stem.rsplit("-", 2)
        card_gb = int(card.removesuffix("gb"))
        recipes.append(CardRecipe(path.stem, card_gb, model, method, _description(path)))
    return sorted(recipes, key=lambda recipe: (recipe.card_gb, recipe.name))


def _description(path: Path) -> str:
    """The comment in the first line of a recipe's file; empty without one."""
    with path.open(encoding="utf-8") as file:
        first_line = file.readline()
    return first_line.removeprefix("#").strip() if first_line.startswith("#") else ""


def find_recipe(name: str) -> Path | None:
    """The file of the recipe called `name`, in the recipes folder or in its `cards`; None without one."""
    is_name = "/" not in name and os.sep not in name
    for folder in (recipes_folder(), recipes_folder() / "cards"):
        path = folder / f"{name.removesuffix('.yaml')}.yaml"
        if is_name and os.path.isfile(path):
            return path
    return None


def nearest_recipe(name: str) -> str:
    """A " Did you mean ...?" with the name of a recipe or of a model; empty if none is near."""
    return nearest(name.removesuffix(".yaml"), recipe_names())


def recipe_names() -> list[str]:
    """Every name that can stand in a recipe's place: of recipes, of recipes for cards, of models."""
    recipes = [name for name, _ in list_recipes()]
    return [*recipes, *(recipe.name for recipe in list_card_recipes()), *list_models()]


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe with every field, defaults included, as YAML. load_recipe makes an equal recipe of it."""
    return f"# Fully resolved: every field, defaults included\n{to_yaml(recipe.model_dump(mode='json'))}"


def find_model_config(name: str) -> Path | None:
    """Path of recipes/models/<name>.json; None if there is no such file (or no recipes folder)."""
    try:
        path = recipes_folder() / "models" / f"{name}.json"
    except InputError:
        return None
    is_name = "/" not in name and os.sep not in name
    return path if is_name and os.path.isfile(path) else None


def nearest_model(name: str) -> str:
    """A " Did you mean ...?" with a name in recipes/models; empty if no name is near, or there are none."""
    try:
        return nearest(name, list_models())
    except InputError:
        return ""


def list_models() -> list[str]:
    """Names of the model configs in recipes/models, sorted."""
    return sorted(path.stem for path in (recipes_folder() / "models").glob("*.json"))


def names_model(source: str) -> bool:
    """Whether `source`, given in a recipe's place, names a model: one in recipes/models, the path of a
    config.json or of a checkpoint's folder, or a Hugging Face id. If a recipe has the same name, it does not.
    """
    is_name = "/" not in source and os.sep not in source
    if source.endswith((".yaml", ".yml")) or (is_name and find_recipe(source) is not None):
        return False
    if find_model_config(source) is not None:
        return True
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return os.path.isfile(path / "config.json")
    if os.path.exists(path):
        return path.suffix == ".json" and "model_type" in read_mapping(path, "recipe")
    owner, _, name = source.partition("/")
    is_id = bool(owner and name) and "/" not in name and owner[0] not in ".~"
    return is_id and not name.endswith(".json") and not os.path.isdir(owner)


def model_name(model: str) -> str:
    """The name of a recipe that is a model alone: its id without the owner, or its file's or folder's."""
    path = Path(os.path.abspath(os.path.expanduser(model)))
    if path.name == "config.json":
        path = path.parent
    return path.name.removesuffix(".json")


def _recipe_path(source: str) -> Path:
    """The file of the recipe that `source` names. Raises InputError where there is none."""
    is_name = "/" not in source and os.sep not in source
    path = Path(os.path.expanduser(source))
    if source and os.path.isdir(path) and (not is_name or find_recipe(source) is None):
        raise InputError(
            f"{shortened(source)} is a folder without a config.json. Give a recipe's .yaml file, or the "
            "folder of a whole model: of an adapter, that of the model that it adapts."
        )
    if os.path.exists(path) and (not is_name or path.suffix in (".yaml", ".yml")):
        return path
    if not is_name:
        hint = nearest(path.name, [sibling.name for sibling in path.parent.glob("*.yaml")])
        raise InputError(
            f"there is no recipe file {shortened(source)}.{hint} Give a file, a recipe's name or a model's."
        )
    # a bare word is a recipe's name first, whatever lies in the current folder
    named = find_recipe(source)
    if named is not None:
        return named
    if source and os.path.exists(path):
        return path
    if source.startswith("model="):
        raise InputError(f"{source}: name the model itself, where a recipe's name would be: {source[6:]}.")
    raise InputError(
        f"there is no recipe and no model {shortened(source)!r}, neither in {recipes_folder()} nor as a file."
        f"{nearest_recipe(source)} `harness recipes` and `harness models` list the names."
    )


def _parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The field values in `key=value` texts. Raises InputError for what is no such text or no field's."""
    changes: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(
                f"the override {shortened(text)!r} is not key=value. Write for example seq_len=4096."
            )
        if not value.strip():
            raise InputError(f"the override {text!r} has no value. Write {key}=VALUE.")
        if key == "hardware":
            raise InputError(
                f"{shortened(text)}: this command takes no device of the table. `harness simulate` and "
                "`harness napkin` do."
            )
        if key in BESIDE:
            hint = f" The card of an estimate is hardware={shortened(value)}." if key == "gpu" else ""
            raise InputError(
                f"{shortened(text)}: {key} is no field of a recipe, and an option of some commands. Write "
                f"--{key} {shortened(value)} where `harness COMMAND --help` has it.{hint}"
            )
        if key in changes:
            raise InputError(f"{key} is overridden twice on the command line. Keep one {key}=value.")
        changes[key] = parse_yaml(value, f"the value of the override {shortened(text)!r}")
    return changes


def _with_whole_paths(fields: Mapping[str, Any], folder: Path, origin: str) -> dict[str, Any]:
    """`fields` with `model` and `data` made absolute where they are files or folders seen from `folder`."""
    whole = dict(fields)
    for name in ("model", "data"):
        value = fields.get(name)
        if not isinstance(value, str) or value in ("", "synthetic") or "://" in value:
            continue
        if name == "model" and find_model_config(value):
            continue
        path = os.path.normpath(os.path.join(folder, os.path.expanduser(value)))
        if os.path.exists(path):
            whole[name] = path
        elif name == "data" and value.endswith(DATA_SUFFIXES):
            raise InputError(
                f"{origin}: data: there is no file {path}. Give the path of a .txt, .jsonl, .json or "
                ".parquet file (seen from the recipe's own folder, or from the current one on the command "
                "line), or data: synthetic."
            )
    return whole
