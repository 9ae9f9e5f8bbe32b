"""The toggle `compile`: torch.compile runs the model's forward and backward."""

from torch import nn

from harness.recipe import Recipe


def compile_model(recipe: Recipe, model: nn.Module) -> None:
    if recipe.compile:
        model.compile()
