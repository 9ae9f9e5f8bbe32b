"""The toggle `train_vision`: whether a model's image tower and its projector are trained."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from harness.recipe import Recipe
from harness.training.model_config import has_tower


def freeze_vision(recipe: Recipe, model: Any) -> None:
    """Unless the recipe trains them, freeze the image tower of `model` and the projector between tower and
    decoder, as is the default of LLaMA-Factory (freeze_vision_tower, freeze_multi_modal_projector)."""
    if recipe.train_vision:
        return
    for _, part in vision_parts(model):
        part.requires_grad_(False)


def not_adapted(recipe: Recipe, model: Any) -> list[str]:
    """Paths of the layers of a frozen image tower, which get no adapter, whatever their names."""
    if recipe.train_vision:
        return []
    return [
        f"{path}.{name}".rstrip(".") for path, part in vision_parts(model) for name, _ in part.named_modules()
    ]


def vision_parts(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model of images and text that are neither its decoder nor its head, with their paths:
    the image tower and the projector. None for any other model."""
    if not has_tower(model):
        return
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    around = {id(part) for part in model.modules() if any(each is decoder for each in part.modules())}
    with_head = any(part is head for part in decoder.modules())  # as in Llama 4
    if not with_head and not around - {id(model), id(decoder)}:  # the model is a decoder alone
        return
    for path, part in model.named_modules():
        above = model.get_submodule(path.rpartition(".")[0])
        if id(above) in around - {id(decoder)} and id(part) not in around and part is not head:
            yield path, part
