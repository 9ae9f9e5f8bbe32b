"""The toggles `compile` and `activation_memory_budget`: torch.compile runs the model."""

from torch import nn

from harness.recipe import Recipe


def compile_model(recipe: Recipe, model: nn.Module) -> None:
    """Have the model compiled when it is first called, by this process's setting of the budget."""
    if recipe.compile:
        import torch._functorch.config as functorch  # takes seconds

        functorch.activation_memory_budget = recipe.activation_memory_budget
        model.compile()
