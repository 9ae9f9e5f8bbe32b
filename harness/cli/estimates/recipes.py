"""`harness recipes`, `harness models` and `harness schema`."""

import json

import typer

from harness.cli.arguments import Overrides, RecipeName
from harness.cli.terminal.lines import tell
from harness.recipe import (
    list_card_recipes,
    list_models,
    list_recipes,
    load_recipe,
    recipe_schema,
    recipe_yaml,
)
from harness.units import GIB

app = typer.Typer(help="List the recipes, or show one fully resolved.", invoke_without_command=True)


@app.callback()
def recipes(context: typer.Context) -> None:
    """List the recipes, one line each."""
    if context.invoked_subcommand is None:
        by_card = [(recipe.name, recipe.description) for recipe in list_card_recipes()]
        for listed in (list_recipes(), by_card):
            width = max((len(name) for name, _ in listed), default=0)
            for name, description in listed:
                tell(f"{name:{width}}  {description}", hanging=width + 2)
            print()
        tell("The second list is by the size of the card: each was seen to fit there, by simulation.")


@app.command("show")
def recipes_show(name: RecipeName, overrides: Overrides = None) -> None:
    """Print a recipe with every field, as YAML that can be run again."""

    print(recipe_yaml(load_recipe(name, overrides or [])[1]), end="")


def models() -> None:
    """List the models that recipes may name: their sizes, and which cards there is a recipe for."""
    from harness.architecture import load_shape, num_parameters

    cards: dict[str, dict[str, int]] = {}
    for recipe in list_card_recipes():  # the smallest card first
        cards.setdefault(recipe.model, {}).setdefault(recipe.method, recipe.card_gb)
    rows = [(name, load_shape(name)) for name in list_models()]
    width = max(len(name) for name, _ in rows)
    tell(f"{'model':{width}} {'millions':>9} bf16 GiB layers hidden vocabulary qlora lora full")
    for name, shape in rows:
        count = num_parameters(shape)
        qlora, lora, full = (cards.get(name, {}).get(method, "-") for method in ("qlora", "lora", "full"))
        tell(
            f"{name:{width}} {count / 1e6:9,.1f} {2 * count / GIB:8.2f} {shape.layers:6} {shape.hidden:6,} "
            f"{shape.vocab:10,} {qlora:>5} {lora:>4} {full:>4}"
        )
    print()
    tell("millions: of parameters, without an adapter.")
    tell("qlora, lora, full: the smallest card, in GB, for which there is a recipe that was seen to fit.")
    tell("A recipe for a card is MODEL-METHOD-CARD, as llama-3.1-8b-lora-24gb: `harness recipes` lists them.")
    tell("A model may also be a config.json, a checkpoint folder or a Hugging Face id.")
    tell("It may stand where a recipe does, as in `harness fit qwen3-14b adapter=lora`.")


def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""

    print(json.dumps(recipe_schema(), indent=1))
