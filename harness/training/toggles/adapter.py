"""The toggle `adapter`: peft's LoRA or IA3 on a frozen base."""

from __future__ import annotations

import warnings
from typing import Any

from harness.errors import InputError, MissingDependency
from harness.recipe import Recipe, shown
from harness.training.model_config import first_line


def with_adapter(recipe: Recipe, model: Any) -> Any:
    """peft's model: the frozen base with LoRA (A Kaiming, B zero) or IA3 weights to train."""
    peft = import_peft(recipe)
    targets = recipe.lora_targets if isinstance(recipe.lora_targets, str) else list(recipe.lora_targets)
    if recipe.adapter == "lora":
        config: Any = peft.LoraConfig(
            r=recipe.lora_rank,
            lora_alpha=recipe.lora_alpha,  # type: ignore[arg-type]
            lora_dropout=recipe.lora_dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        )
    else:
        # peft knows which modules IA3 scales for each architecture; a list replaces its choice.
        config = peft.IA3Config(task_type="CAUSAL_LM")
        if targets != "all-linear":
            config = peft.IA3Config(target_modules=targets, feedforward_modules=[], task_type="CAUSAL_LM")
    try:
        with warnings.catch_warnings():
            # what peft says of a mixture's experts in 4 bit, training/warnings.py says in a sentence
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            adapted = peft.get_peft_model(
                model, config, autocast_adapter_dtype=recipe.adapter_dtype == "fp32"
            )  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(f"lora_targets: {shown(recipe.lora_targets)}: {first_line(error)}.") from error
    _refuse_targets_without_adapter(recipe, adapted)
    return adapted


def import_peft(recipe: Recipe) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingDependency("peft", None, f"adapter: {recipe.adapter}") from None
    return peft


def _refuse_targets_without_adapter(recipe: Recipe, adapted: Any) -> None:
    """Raise InputError if a listed target adapts nothing; peft says so only when none of them does."""
    if recipe.lora_targets == "all-linear":  # a mixture's experts in 4 bit are no linear layers
        return
    config, tuner = adapted.peft_config["default"], adapted.base_model
    found = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    # peft has put a list here, of its own names: a mixture's w1 and w3 are gate_up_proj
    wanted = [*config.target_modules, *(getattr(config, "target_parameters", None) or ())]
    missing = [name for name in wanted if not any(f".{path}".endswith(f".{name}") for path in found)]
    if missing:
        why = ", where experts stored in 4 bit cannot be adapted" if recipe.quantization != "none" else ""
        raise InputError(
            f"lora_targets: {shown(recipe.lora_targets)}: there is no {' and no '.join(missing)} to adapt in "
            f"{recipe.model}{why}. List names of its linear layers, for example [q_proj, v_proj]."
        )
