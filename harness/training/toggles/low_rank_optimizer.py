"""The toggles `optimizer: galore_adamw` and `apollo_adamw`, of the packages galore-torch and apollo-torch:
AdamW that keeps moments of a linear layer's gradient projected to `optimizer_rank` dimensions.

Settings are those of transformers' Trainer (transformers/trainer_optimizer.py).
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import InputError, needed
from harness.recipe import Recipe
from harness.training.toggles.optimizer_state import Build
from harness.training.toggles.scores import head_of


def low_rank(recipe: Recipe, model: nn.Module, rates: dict[str, Any]) -> Build:
    """A function that makes the package's optimizer over weights of `model`. Those of linear layers, except
    for the head, are in a group of their own. Raises InputError for a model without linear layers."""
    kind, settings = _package(recipe)
    head = head_of(model)
    linear = {
        module.weight for module in model.modules() if isinstance(module, nn.Linear) and module is not head
    }
    if not linear:
        raise InputError(
            f"optimizer: {recipe.optimizer}: no layer of {recipe.model} is a torch.nn.Linear, of whose "
            "gradients it would keep moments. Set optimizer: adamw."
        )

    def build(weights: Sequence[Any]) -> torch.optim.Optimizer:
        others: list[Tensor] = [weight for weight in weights if weight not in linear]
        projected: list[Tensor] = [weight for weight in weights if weight in linear]
        groups = [{"params": others}, {"params": projected, "rank": recipe.optimizer_rank, **settings}]
        return kind([group for group in groups if group["params"]], no_deprecation_warning=True, **rates)

    return build


def _package(recipe: Recipe) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer, and Trainer's settings for the weights whose gradients are projected."""
    settings: dict[str, Any] = {"update_proj_gap": 200, "proj_type": "std"}
    name = recipe.optimizer.partition("_")[0]
    with needed(f"{name}-torch", name, f"optimizer: {recipe.optimizer}"):
        if name == "galore":
            from galore_torch import GaLoreAdamW

            return GaLoreAdamW, settings | {"scale": 0.25}
        from apollo_torch import APOLLOAdamW
    adam = {"betas": (0.9, 0.999), "eps": 1e-8}
    return APOLLOAdamW, settings | adam | {"scale": 1.0, "proj": "random", "scale_type": "channel"}
