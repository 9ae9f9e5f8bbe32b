"""The toggle `compile`: the model's forward and backward by torch.compile."""

from __future__ import annotations

from torch import nn

from harness.recipe import Recipe


def compile_model(recipe: Recipe, model: nn.Module) -> None:
    if recipe.compile:
        model.compile()
