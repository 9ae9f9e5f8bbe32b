"""`harness recipes` and `harness schema`."""

from __future__ import annotations

import json

import typer

from harness.cli.arguments import Overrides, RecipeName

app = typer.Typer(help="List the recipes, or show one fully resolved.", invoke_without_command=True)


@app.callback()
def recipes(context: typer.Context) -> None:
    """List the recipes, one line each."""
    if context.invoked_subcommand is None:
        from harness.recipe import list_recipes

        listed = list_recipes()
        width = max(len(name) for name, _ in listed)
        for name, description in listed:
            print(f"{name:{width}}  {description}")


@app.command("show")
def recipes_show(name: RecipeName, overrides: Overrides = None) -> None:
    """Print a recipe with every field, as YAML that can be run again."""
    from harness.recipe import load_recipe, recipe_yaml

    print(recipe_yaml(load_recipe(name, overrides or [])[1]), end="")


def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from harness.recipe import recipe_schema

    print(json.dumps(recipe_schema(), indent=1))
