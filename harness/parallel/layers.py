"""Tensor parallelism: how each layer of a model is divided, as transformers' own plan of the model says.

The plan names linear layers `colwise` (a rank computes some of the outputs) or `rowwise` (a rank takes some
of the inputs, and the outputs are summed), and embeddings `embedding_rowwise` (a rank has some of the words).
Before transformers 5.21 it named the embeddings of models with a tied head alone; here those called
`embed_tokens` are divided with every release, so that a recipe holds the same bytes in the whole window.
All else is computed whole by every rank; its weights are replicated DTensors too, for an optimizer cannot
step plain and divided tensors together.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from harness.errors import CannotDivide
from harness.parallel.deferred import Make
from harness.parallel.units import without_adapter
from harness.recipe import Recipe

STYLES = ("colwise", "rowwise", "colwise_gather_output", "embedding_rowwise")
"""The styles of transformers' plans that torch.distributed.tensor.parallel has with the same meaning."""


class Whole(ParallelStyle):
    """A module that every rank computes alike: its weights are replicated, its inputs and outputs plain."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for name, weight in list(part.named_parameters(recurse=False)):
                whole = distribute_tensor(weight.detach(), mesh, [Replicate()], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(whole, weight.requires_grad))

        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, replicate, enter, leave)


def divided_layers(recipe: Recipe, model: Any, mesh: DeviceMesh, make: Make) -> Make:
    """A function that makes modules of `model` by `make` and divides their layers among the ranks of `mesh`,
    one after the other, so that one layer is whole at a time.

    Raises CannotDivide for a model without such a plan, and for heads that do not divide.
    """
    base = without_adapter(model)
    plan = _plan(recipe, base)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    tied: bool = head is not None and embedding.weight is head.weight
    styles: dict[nn.Module, ParallelStyle] = {}
    found: set[str] = set()
    for name, module in base.named_modules():
        style = plan.get(re.sub(r"\b\d+\b", "*", name))
        if style is not None:
            new = _styles(name, module, style)
        elif any(True for _ in module.parameters(recurse=False)) and found.isdisjoint(_with_ancestors(name)):
            new = {name: Whole()}
        else:
            continue
        found |= new.keys()
        styles |= {base.get_submodule(part): style for part, style in new.items()}

    def make_divided(modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        for part in [part for module in modules for part in module.modules()]:
            style = styles.pop(part, None)
            if style is None:
                continue
            make([part])
            parallelize_module(part, mesh, style, src_data_rank=None)  # every rank has the same values
            if head is not None and tied and part in (embedding, head):
                embedding.weight = head.weight = part.weight
        make(modules)  # buffers

    return make_divided


def _with_ancestors(name: str) -> Iterator[str]:
    """A module's name and those of the modules that contain it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _plan(recipe: Recipe, base: Any) -> dict[str, str]:
    """The style of each kind of module, by its name with `*` for numbers. Raises CannotDivide."""
    plan = dict(getattr(base, "tp_plan", None) or {})
    if not plan:
        raise CannotDivide(
            f"parallel: tp: transformers has no plan that divides the layers of {base.config.model_type}. "
            "Set parallel: fsdp."
        )
    unknown = sorted({style for style in plan.values() if style not in STYLES})
    if unknown:
        raise CannotDivide(
            f"parallel: tp: {base.config.model_type} is divided by {', '.join(unknown)}, which is not built "
            "here. Set parallel: fsdp."
        )
    config = base.config.get_text_config()
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if heads is not None and heads % recipe.tp:
            raise CannotDivide(
                f"tp: {recipe.tp} does not divide the {heads} {what} of {recipe.model}. Give a divisor."
            )
    embedding = base.get_input_embeddings()
    name = next(name for name, module in base.named_modules() if module is embedding)
    named = {name: "embedding_rowwise"} if name.endswith("embed_tokens") else {}
    return named | plan


def _styles(name: str, module: nn.Module, style: str) -> dict[str, ParallelStyle]:
    """The styles of a linear layer by module name; for an adapted layer, of its base and both added matrices.

    In a colwise layer A is whole, and B computes the outputs of its rank; in a rowwise layer A takes the
    inputs of its rank, and B is whole.
    """
    if hasattr(module, "base_layer"):
        found: dict[str, ParallelStyle] = {f"{name}.base_layer": _style(style)}
        for part in ("lora_A", "lora_B"):
            for adapter in getattr(module, part, {}):
                divided = part == ("lora_A" if style == "rowwise" else "lora_B")
                found[f"{name}.{part}.{adapter}"] = _style(style) if divided else Whole()
        return found
    return {name: _style(style)}


def _style(style: str) -> ParallelStyle:
    if style == "rowwise":
        return RowwiseParallel()
    if style == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    return (
        ColwiseParallel(output_layouts=Replicate()) if style == "colwise_gather_output" else ColwiseParallel()
    )
