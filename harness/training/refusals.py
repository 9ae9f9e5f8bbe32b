"""Refuses models and toggles that cannot run, before or after the model is built, and says the fix."""

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import InputError
from harness.recipe import Recipe
from harness.training.model_config import model_class, shapes_of
from harness.training.toggles.adapter import dropout_problems, missing_targets
from harness.training.toggles.attention import attention_problems, require_flash_package
from harness.training.toggles.chunked_loss import chunked_loss_problems
from harness.training.toggles.gradient_checkpointing import checkpointing_problems
from harness.training.toggles.liger import fused_loss_problems


def refuse_what_cannot_run(recipe: Recipe, config: Any, device: torch.device) -> None:
    """Raise one InputError that names all toggles which the model or `device` does not support, or
    MissingDependency for kernels that are not installed.
    """
    problems = [
        *attention_problems(recipe, config, device),
        *checkpointing_problems(recipe, config),
        *fused_loss_problems(recipe, config, device),
        *chunked_loss_problems(recipe, config, model_class(recipe, config)),
    ]
    if problems:
        problems += [*missing_targets(recipe, config), *dropout_problems(recipe, config)]
        lines = list(dict.fromkeys(problem.line for problem in problems))
        if len(lines) == 1:
            raise InputError(f"{problems[0].sentence}; set {lines[0]}.")
        sentences = "; ".join(problem.sentence for problem in problems)
        raise InputError(f"model: {recipe.model}: {sentences}. All that must change: {', '.join(lines)}.")
    require_flash_package(recipe, device)


def refuse_empty_weights(recipe: Recipe, model: nn.Module) -> None:
    """Raise InputError for a config with a size that leaves a weight without elements: a step would fail."""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise InputError(
                f"model: {recipe.model}: its config makes {name} a weight of shape "
                f"{tuple(parameter.shape)}. Correct the size that is 0."
            )


def refuse_missing_weights(recipe: Recipe, missing: Collection[str]) -> None:
    """Raise InputError where a checkpoint has no values for the weights `missing`: transformers makes random
    ones, and says so only in a notice."""
    if missing:
        names = sorted(missing)
        raise InputError(
            f"weights: pretrained: {recipe.model} lacks {len(names)} weights of the model, {names[0]} the "
            "first of them, and they would be random. Give a checkpoint that has them all, or set weights: "
            "random."
        )


def refuse_what_is_no_language_model(recipe: Recipe, config: Any) -> None:
    """Raise InputError for a model that sees the token it is to predict, or whose loss is about another.

    An encoder's class needs is_decoder before it masks later tokens. A loss that does not shift the labels
    compares each output with the token that was just read.
    """
    architecture = model_class(recipe, config)
    if architecture is None or recipe.by_row:  # a text is read as a whole before it is scored
        return
    # such a class tells its user to set is_decoder, because its attention is causal only then
    asks = "is_decoder=True" in inspect.getsource(architecture.__init__)
    if getattr(config, "is_decoder", None) is False and asks:
        raise InputError(
            f"model: {recipe.model}: as configured, {config.model_type} looks at the tokens that it is to "
            'predict. Write "is_decoder": true into its config.json.'
        )
    if not _shifts_by_its_class(architecture) and shifts_labels(shapes_of(recipe, config)) is False:
        raise InputError(
            f"model: {recipe.model}: the loss of {config.model_type} compares each output with the token "
            "just read, not with the next one, so it would learn to copy. Choose a model whose loss shifts "
            "its labels, like llama or gpt2."
        )


def _shifts_by_its_class(architecture: Any) -> bool:
    """Whether the class calls transformers' loss of causal language models, which shifts the labels."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    standard = LOSS_MAPPING.get(getattr(architecture, "loss_type", None) or "ForCausalLM") is ForCausalLMLoss
    return standard and "self.loss_function(" in inspect.getsource(inspect.unwrap(architecture.forward))


_LABELS = (1_000_001, 1_000_002, 1_000_003, 1_000_004)
"""Labels with numbers that no model computes otherwise, so that they are recognized."""


class _LabelsInLoss(TorchFunctionMode):
    """Keeps labels real in a forward pass on shapes, and notes the first that the loss compares with."""

    first: int | None = None
    """The first label that the loss compares with; None before that, or if it does not show."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            target = args[1] if len(args) > 1 else kwargs["target"]
            if not target.is_meta:
                self.first = int(target.flatten()[0])
            return torch.empty((), device="meta")
        if func in (Tensor.__bool__, Tensor.item) and args[0].is_meta:
            return False  # the model asks whether there is padding
        if func is Tensor.to and not args[0].is_meta and {*args[0].flatten().tolist()} & {*_LABELS}:
            return args[0]
        return func(*args, **kwargs)


def shifts_labels(model: Any) -> bool | None:
    """Whether the loss of `model`, which is on the meta device, compares the output at each token with the
    next token; None where its forward pass does not show that.
    """
    watch = _LabelsInLoss()
    ids = torch.ones(1, len(_LABELS), dtype=torch.int64, device="meta")
    try:
        with _disable_current_modes(), watch:
            model(input_ids=ids, labels=torch.tensor([_LABELS]), use_cache=False)
    except Exception:  # any model's own code can fail here: a model that cannot be watched is not refused
        return None
    return {_LABELS[0]: False, _LABELS[1]: True}.get(watch.first or 0)
