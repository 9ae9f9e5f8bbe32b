"""Warnings about a built model that differs from what the recipe's author may expect."""

import inspect
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from harness.architecture import surprises_of_saved_weights
from harness.recipe import Recipe, surprises_of_quantization
from harness.training.toggles.scores import head_of

QUANTIZED = ("Linear4bit", "Linear8bitLt", "ParametrizationList")
"""The types of modules whose weight bitsandbytes quantized. Under FSDP the weight does not say it: it is a
DTensor of 16-bit numbers, each of which holds four values."""


def surprises_of_model(recipe: Recipe, model: nn.Module) -> list[str]:
    """Warnings about kernels, quantization and adapters of `model`, which model.build_model has built."""
    kernels = _kernels_of(model)
    names = [getattr(module.forward, "__qualname__", "") for module in model.modules()]
    if any(name.startswith("LigerExperts.") for name in names):
        kernels.append(
            "kernels: liger multiplies by the experts in kernels whose work no estimate of time knows: the "
            "step takes longer. The first step takes 0.25 GiB more, in which Triton measures them"
        )
    if not getattr(model, "is_quantized", False):  # as from_pretrained makes it of such a checkpoint
        kernels += surprises_of_saved_weights(recipe)
    if not recipe.quantized:
        return kernels
    experts: list[Any] = [part for part in model.modules() if hasattr(part, "parametrizations")]
    states = [state for part in experts for state in part.parametrizations.values()]
    return kernels + surprises_of_quantization(
        recipe,
        {name for part in experts for name in part.parametrizations},
        sum(state[0].quant_state.shape.numel() for state in states),  # elements before they were packed
        _left_in_16_bit(model),
        sum(p.nbytes for p in model.parameters()),
    )


KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}
"""Optional modules with kernels for recurrent layers, which transformers uses where they are installed, and
their packages."""
_MENTIONED = re.compile(r'_with_fallback\("\w+", "(\w+)"\)|^ *from (\w+)[\w.]* import', re.MULTILINE)


def _kernels_of(model: nn.Module) -> list[str]:
    """Sentences about which of KERNELS the model's recurrent layers run with, and which are not installed."""
    files = {inspect.getsourcefile(type(module)) for module in model.modules()}
    sources = (Path(path).read_text(encoding="utf-8") for path in files if path and "modeling_" in path)
    names = {name for source in sources for found in _MENTIONED.findall(source) for name in found}
    used = [name for name in KERNELS if name in names]
    sentences: list[str] = []
    if lacking := [KERNELS[name] for name in used if find_spec(name) is None]:
        sentences.append(
            f"recurrent layers run as PyTorch's own operators, without the packages {', '.join(lacking)}: "
            "with their kernels the temporaries are others, which can be gigabytes less, and a step is faster"
        )
    if present := [KERNELS[name] for name in used if find_spec(name) is not None]:
        sentences.append(f"recurrent layers run with the kernels of {', '.join(present)}")
    return sentences


def _left_in_16_bit(model: nn.Module) -> dict[str, int]:
    """Bytes of the frozen matrices that are not quantized, by the last parts of their names; without
    embeddings and head."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = head_of(model)
    other = {id(p) for table in [*tables, *([head] if head is not None else [])] for p in table.parameters()}
    quantized = [module for module in model.modules() if type(module).__name__ in QUANTIZED]
    other |= {id(p) for module in quantized for p in module.parameters(recurse=False)}
    sizes: dict[str, int] = defaultdict(int)
    for name, parameter in model.named_parameters():
        matrix = parameter.dim() >= 2 and parameter.is_floating_point() and not parameter.requires_grad
        if matrix and id(parameter) not in other:
            path = name.replace(".base_layer", "")  # the layer that peft adapts
            sizes[".".join(path.rsplit(".", 2)[-2:])] += parameter.nbytes
    return sizes
