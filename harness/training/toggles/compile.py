"""The toggle `compile`: the model's forward and backward by torch.compile."""

from torch import nn

from harness.recipe import Recipe


def compile_model(recipe: Recipe, model: nn.Module) -> None:
    if recipe.compile:
        model.compile()
