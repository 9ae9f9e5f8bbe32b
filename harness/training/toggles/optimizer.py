"""The toggles `optimizer`, `optimizer_impl` and `lora_plus_ratio`: builds the recipe's optimizer."""

from typing import Any

import torch
from torch import nn

from harness.errors import InputError, needed
from harness.recipe import Recipe
from harness.training.toggles.low_rank_optimizer import low_rank
from harness.training.toggles.muon import muon_and_adamw
from harness.training.toggles.optimizer_in_backward import OptimizerInBackward
from harness.training.toggles.optimizer_state import Build
from harness.training.toggles.stepped_copy import SteppedCopy

FP16_ADAM_EPS = 1e-4
"""AdamW's eps where its moments are fp16: a usual choice that fp16 can represent."""


def build_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the weights of `model` that require a gradient.

    Raises InputError if nothing requires one.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise InputError(
            "nothing to train: no weight requires a gradient. Set adapter: lora or adapter: none."
        )
    build = _constructor(recipe, model)
    if recipe.by_muon:
        return muon_and_adamw(model, recipe.learning_rate, recipe.weight_decay, build)
    if recipe.optimizer_in_backward:
        return OptimizerInBackward(trained, build)
    host = recipe.optimizer_on_host and not recipe.parameters_on_host
    if recipe.master_weights or host:
        return SteppedCopy(trained, build, torch.float32 if recipe.master_weights else None, host=host)
    return build(trained if recipe.lora_plus_ratio is None else _lora_plus(recipe, model))


def _lora_plus(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """The groups of LoRA+ (arXiv 2402.12354, peft/optimizers/loraplus.py): B and vectors learn faster."""
    assert recipe.lora_plus_ratio is not None
    slow, fast = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (fast if "lora_B" in name or parameter.ndim == 1 else slow).append(parameter)
    return [{"params": slow}, {"params": fast, "lr": recipe.learning_rate * recipe.lora_plus_ratio}]


def _constructor(recipe: Recipe, model: nn.Module) -> Build:
    """A function that makes the recipe's optimizer over parameters of `model`; for muon, AdamW.

    sgd has no momentum and so no state. bitsandbytes quantizes the state of tensors with at least
    4096 elements, embeddings included (Trainer keeps 32-bit state for those).
    """
    rates: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    line = f"optimizer: {recipe.optimizer}"
    if recipe.by_bitsandbytes:
        with needed("bitsandbytes", None, line):
            import bitsandbytes as bnb
        classes = {
            "adamw_8bit": bnb.optim.AdamW8bit,
            "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
            "paged_adamw": bnb.optim.PagedAdamW,
            "lion_8bit": bnb.optim.Lion8bit,
        }
        return lambda params: classes[recipe.optimizer](params, **rates)
    if recipe.by_torchao:
        with needed("torchao", "torchao", line):
            from torchao.optim import AdamW4bit, AdamW8bit  # pyright: ignore[reportMissingImports]
        low_bit = AdamW8bit if recipe.optimizer == "adamw_torch_8bit" else AdamW4bit
        return lambda params: low_bit(params, **rates)
    if recipe.low_rank_optimizer:
        return low_rank(recipe, model, rates)
    foreach = recipe.optimizer_impl == "foreach"
    if recipe.optimizer == "adafactor":
        return lambda params: torch.optim.Adafactor(params, foreach=foreach, **rates)
    kind = torch.optim.SGD if recipe.optimizer == "sgd" else torch.optim.AdamW
    fused = recipe.optimizer_impl == "fused"
    if kind is torch.optim.AdamW and recipe.scaled and not (recipe.mixed or recipe.master_weights):
        # 1e-8 is 0 in fp16, and so is the square of a small gradient: the update would be 0 / 0
        rates["eps"] = FP16_ADAM_EPS
    if recipe.optimizer == "adamw_schedule_free":
        return _schedule_free(recipe, foreach=foreach, **rates)
    return lambda params: kind(params, foreach=foreach, fused=fused, **rates)


def _schedule_free(recipe: Recipe, **settings: Any) -> Build:
    """AdamW of arXiv 2405.15682 in train mode: the model has the weights that gradients are computed at."""
    with needed("schedulefree", "schedule-free", f"optimizer: {recipe.optimizer}"):
        from schedulefree import AdamWScheduleFree

    def build(params: Any) -> torch.optim.Optimizer:
        optimizer = AdamWScheduleFree(params, **settings)
        optimizer.train()
        return optimizer

    return build
