"""What is refused before a model is built, or when it has been: each with the line of the recipe to write."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from harness.errors import InputError, MissingDependency
from harness.recipe import Recipe

FLASH_ATTN_3 = (
    "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
    "python setup.py install (it needs a Hopper GPU and CUDA 12.3 or newer)"
)
"""How version 3 is installed, a package of its own (its README); flash-attn is version 2."""


class Problem(NamedTuple):
    """A field that must change."""

    sentence: str
    line: str
    """What to write instead."""


def refuse_what_cannot_run(recipe: Recipe, config: Any, device: torch.device) -> None:
    """Raise one InputError that names all toggles which the model or `device` does not have; and
    MissingDependency for kernels that are not installed.
    """
    problems = [*_of_the_model(recipe, config), *_of_the_device(recipe, config, device)]
    if problems:
        problems += _of_the_targets(recipe, config)
        lines = list(dict.fromkeys(problem.line for problem in problems))
        if len(lines) == 1:
            raise InputError(f"{problems[0].sentence}; set {lines[0]}.")
        sentences = "; ".join(problem.sentence for problem in problems)
        raise InputError(f"model: {recipe.model}: {sentences}. All that must change: {', '.join(lines)}.")
    if recipe.attention.startswith("flash_attention") and device.type != "meta":
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        two = recipe.attention == "flash_attention_2"
        if not (is_flash_attn_2_available() if two else is_flash_attn_3_available()):
            # without this, transformers would fetch a kernel from the Hub
            needed_for = f"attention: {recipe.attention}"
            if two:
                raise MissingDependency("flash-attn", "flash-attn", needed_for)
            raise MissingDependency("flash-attn-3", None, needed_for, FLASH_ATTN_3)


def _of_the_model(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """What the model's class says that it cannot do."""
    made_by = model_class(config)
    if recipe.attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        # transformers before 5.23 runs it all the same, and leaves the capping out
        yield Problem(
            f"attention: sdpa: {config.model_type} caps its attention scores, which sdpa cannot",
            "attention: eager",
        )
    elif made_by is not None and not _has_attention(made_by, recipe.attention):
        yield Problem(
            f"attention: {recipe.attention}: {recipe.model} cannot run with it",
            f"attention: {_attention_without_flash(made_by)}",
        )
    if recipe.gradient_checkpointing and made_by is not None and not made_by.supports_gradient_checkpointing:
        yield Problem(
            f"gradient_checkpointing: transformers has none for {config.model_type}",
            "gradient_checkpointing: false",
        )
    if recipe.loss == "fused_linear" and not _liger_has(config.model_type):
        yield Problem(f"loss: fused_linear: Liger has no {config.model_type} model", "loss: standard")


def _of_the_device(recipe: Recipe, config: Any, device: torch.device) -> Iterator[Problem]:
    if device.type != "cpu":  # on meta nothing runs
        return
    if recipe.attention.startswith("flash_attention"):
        yield Problem(
            f"attention: {recipe.attention} needs an NVIDIA GPU",
            f"attention: {_attention_without_flash(model_class(config))}",
        )
    if recipe.loss == "fused_linear" and os.environ.get("TRITON_INTERPRET") != "1":
        yield Problem("loss: fused_linear runs Liger's Triton kernels, which need a GPU", "loss: standard")


def _of_the_targets(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """lora_targets that the model does not have, by its shapes: the next error, said with the first."""
    if recipe.adapter == "none" or recipe.lora_targets == "all-linear":
        return
    model = shapes_of(recipe, config)
    paths = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    missing = [
        name for name in recipe.lora_targets if not any(f".{path}".endswith(f".{name}") for path in paths)
    ]
    if missing:
        linear = {
            name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)
        }
        yield Problem(
            f"lora_targets: there is no {' and no '.join(missing)}",
            f"lora_targets: [{', '.join(sorted(linear - {'lm_head'}))}]",
        )


def model_class(config: Any) -> Any:
    """transformers' class for `config` as a causal language model; None for a checkpoint's own code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # which has a `get` that raises
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else None


def shapes_of(recipe: Recipe, config: Any) -> Any:
    """The model of `config` without memory, seen by nobody who counts bytes."""
    from transformers import AutoModelForCausalLM

    with _disable_current_modes(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", trust_remote_code=recipe.trust_remote_code
        )
        return model.to("meta")  # torch.FloatTensor(...) is on the CPU in any context


def _has_attention(made_by: Any, attention: str) -> bool:
    needed = {"eager": None, "sdpa": "_supports_sdpa"}.get(attention, "_supports_flash_attn")
    return needed is None or bool(getattr(made_by, needed, True))


def _attention_without_flash(made_by: Any) -> str:
    return "sdpa" if made_by is None or _has_attention(made_by, "sdpa") else "eager"


def _liger_has(model_type: str) -> bool:
    """Where Liger is not installed, that is said when it is asked for."""
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError:
        return True
    return model_type in MODEL_TYPE_TO_APPLY_LIGER_FN


def refuse_empty_weights(recipe: Recipe, model: nn.Module) -> None:
    """Raise InputError for a config whose sizes leave a weight without an element: it fails in a step."""
    for name, parameter in model.named_parameters():
        if not parameter.numel():
            raise InputError(
                f"model: {recipe.model}: its config makes {name} a weight of shape "
                f"{tuple(parameter.shape)}. Correct the size that is 0."
            )


def refuse_what_is_no_language_model(recipe: Recipe, config: Any) -> None:
    """Raise InputError for a model that sees the token it is to predict, or is not trained on the next one.

    By what the model itself is: an encoder's class asks for is_decoder before it masks what comes after; and
    a loss that does not shift the labels compares each output with the token that was just read.
    """
    made_by = model_class(config)
    if made_by is None:
        return
    if getattr(config, "is_decoder", None) is False and _asks_for_decoder(made_by):
        raise InputError(
            f"model: {recipe.model}: as configured, {config.model_type} looks at the tokens that it is to "
            'predict. Write "is_decoder": true into its config.json.'
        )
    if not _shifts_by_its_class(made_by) and shifts_labels(shapes_of(recipe, config)) is False:
        raise InputError(
            f"model: {recipe.model}: the loss of {config.model_type} compares each output with the token "
            "just read, not with the next one, so it would learn to copy. Choose a model whose loss shifts "
            "its labels, like llama or gpt2."
        )


def _asks_for_decoder(made_by: Any) -> bool:
    """Whether the class tells its user to set is_decoder: transformers warns so where attention is not causal
    without it.
    """
    return "is_decoder=True" in inspect.getsource(made_by.__init__)


def _shifts_by_its_class(made_by: Any) -> bool:
    """Whether forward calls the loss that transformers gives causal language models, which shifts."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    standard = LOSS_MAPPING.get(getattr(made_by, "loss_type", None) or "ForCausalLM") is ForCausalLMLoss
    return standard and "self.loss_function(" in inspect.getsource(inspect.unwrap(made_by.forward))


_LABELS = (1_000_001, 1_000_002, 1_000_003, 1_000_004)
"""Numbers that a model makes nowhere else."""


class _LabelsInLoss(TorchFunctionMode):
    """Keeps labels real in a forward pass on shapes, and what the loss compares with first in `first`."""

    first: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (nn.functional.cross_entropy, nn.functional.nll_loss):
            target = args[1] if len(args) > 1 else kwargs["target"]
            if not target.is_meta:
                self.first = int(target.flatten()[0])
            return torch.empty((), device="meta")
        if func in (Tensor.__bool__, Tensor.item) and args[0].is_meta:
            return False  # a question about padding
        if func is Tensor.to and not args[0].is_meta and {*args[0].flatten().tolist()} & {*_LABELS}:
            return args[0]
        return func(*args, **kwargs)


def shifts_labels(model: Any) -> bool | None:
    """Whether the loss of `model` (on the meta device) compares the output at each token with the next token;
    None where its forward pass does not show that.
    """
    watch = _LabelsInLoss()
    ids = torch.ones(1, len(_LABELS), dtype=torch.int64, device="meta")
    try:
        with _disable_current_modes(), watch:
            model(input_ids=ids, labels=torch.tensor([_LABELS]), use_cache=False)
    except Exception:  # any model's own code: what cannot be watched is not refused
        return None
    return {_LABELS[0]: False, _LABELS[1]: True}.get(watch.first or 0)
