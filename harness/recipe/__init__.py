"""A fine-tuning step as data: its fields, the rules between them, and the files it comes from."""
# pyright: reportUnusedImport=false

from harness.recipe.check import ImpossiblePair, check_recipe, no_field, recipe_schema, shortened
from harness.recipe.derived import RECORDED_STEPS
from harness.recipe.effects import EFFECTS, fields_that_change
from harness.recipe.file import (
    CardRecipe,
    changed_recipe,
    find_model_config,
    find_recipe,
    list_card_recipes,
    list_models,
    list_recipes,
    load_recipe,
    model_name,
    names_model,
    nearest_model,
    nearest_recipe,
    recipe_names,
    recipe_yaml,
)
from harness.recipe.mesh import OF_RANKS, on_more_ranks, on_ranks, surprises_of_mesh
from harness.recipe.recipe import Recipe
from harness.recipe.rules import shown
from harness.recipe.surprises import surprises_of_quantization
