"""The toggle `adapter`: LoRA, IA3 or another method of peft on a frozen base."""

import warnings
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from torch import nn

from harness.errors import InputError, MissingDependency, first_line, is_out_of_memory, nearest
from harness.recipe import Recipe, shown
from harness.training.failures import FULL_PRECISION, NO_VALUES, needs_values
from harness.training.model_config import shapes_of
from harness.training.toggles import Problem
from harness.training.toggles.vision import not_adapted

REFUSED = (ValueError,)
UNCHECKED = (*REFUSED, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)
"""Errors of peft: for what it refuses, and for values of its own fields that it does not check."""


class _CannotDrop(InputError):
    """peft has no dropout for inputs of weights that are no linear layers, as a mixture's experts."""


def with_adapter(recipe: Recipe, model: Any) -> Any:
    """peft's model: the frozen `model` with the recipe's adapter. For a recipe without adapter, `model`
    itself. Raises InputError for what peft refuses."""
    if recipe.trains_base:
        return model
    model.requires_grad_(False)
    peft = import_peft(recipe)
    config = _config(recipe, peft, not_adapted(recipe, model))
    raised, linear = UNCHECKED if recipe.peft else REFUSED, _linear_layers(model)
    try:
        with warnings.catch_warnings():
            # training/warnings.py says in a sentence what peft warns of a mixture's experts in 4 bit
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
            adapted = peft.get_peft_model(
                model, config, autocast_adapter_dtype=recipe.adapter_dtype == "fp32"
            )  # type: ignore[arg-type]
    except raised as error:
        if is_out_of_memory(error):
            raise
        if recipe.lora_dropout and "lora_dropout" in str(error):
            raise _CannotDrop(
                f"{_cannot_drop(recipe)}; set lora_dropout: 0, or name linear layers in lora_targets: "
                f"{', '.join(linear)}."
            ) from error
        field = "peft" if recipe.peft else "lora_targets"
        setting = f"{field}: {shown(getattr(recipe, field))}"
        if needs_values(model, error):
            raise InputError(f"{setting}: peft asks for values of {recipe.model}. {NO_VALUES}") from error
        # for all-linear peft itself lists layers that it refuses, as a state-space layer's out_proj
        possible = [name for name in linear if f"'{name}'" not in str(error)]
        fix = "" if recipe.peft else f" Its linear layers are {', '.join(linear)}."
        if recipe.quantized and recipe.adapter == "peft":
            fix = f" Set {FULL_PRECISION}."
        if recipe.adapts_every_linear and possible != linear:
            fix = f" The others are lora_targets: [{', '.join(possible)}]."
        raise InputError(f"{setting}: {first_line(error).rstrip('.')}.{fix}") from error
    _refuse_targets_without_adapter(recipe, adapted)
    return adapted


OWN_TARGETS = ("IA3", "LN_TUNING", "TRAINABLE_TOKENS")
"""Methods of peft that adapt other modules than linear layers, or few of these: peft itself knows which ones,
unless a list names others."""


def _config(recipe: Recipe, peft: Any, left_out: list[str]) -> Any:
    """peft's config for the adapter, with the fields in `recipe.peft`. `left_out`: paths of layers that get
    no adapter. Raises InputError for fields and values that peft does not have."""
    targets = recipe.lora_targets if isinstance(recipe.lora_targets, str) else list(recipe.lora_targets)
    more = dict(recipe.peft)
    lora_fields = {
        "r": recipe.lora_rank,
        "lora_alpha": recipe.lora_alpha,
        "lora_dropout": recipe.lora_dropout,
        "use_rslora": recipe.use_rslora,
        "use_dora": recipe.use_dora,
    }
    without_words = "SEQ_CLS" if recipe.scores else "FEATURE_EXTRACTION"
    arguments: dict[str, Any] = {"task_type": without_words if recipe.by_row else "CAUSAL_LM"}
    if recipe.adapter == "lora":
        kind, arguments = peft.LoraConfig, {**arguments, "target_modules": targets, **lora_fields}
    elif recipe.adapter == "ia3":
        kind = peft.IA3Config
        # peft knows which modules IA3 scales for each architecture; a list replaces its choice.
        if targets != "all-linear":
            arguments |= {"target_modules": targets, "feedforward_modules": []}
    else:
        kinds = {name.value: each for name, each in peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
        name = str(more.pop("peft_type")).upper()
        if name not in kinds:
            hint = nearest(name, [each.lower() for each in kinds]) or f" It has {', '.join(kinds)}."
            raise InputError(f"peft: peft_type: this peft has no method {name}.{hint}")
        kind = kinds[name]
        choosable = "target_modules" in {field.name for field in fields(kind)} - more.keys()
        if choosable and not (name in OWN_TARGETS and targets == "all-linear"):
            arguments["target_modules"] = targets
    if left_out and "exclude_modules" in {field.name for field in fields(kind)} - more.keys():
        arguments["exclude_modules"] = left_out
    for name in more:
        if name in arguments:
            own = {"r": "lora_rank", "target_modules": "lora_targets"}.get(name, name)
            raise InputError(f"peft: {name} has a field of its own in a recipe: write {own}.")
        known = sorted(field.name for field in fields(kind) if field.init)
        if name not in known:
            hint = nearest(name, known) or f" It has {', '.join(known)}."
            raise InputError(f"peft: {kind.__name__} has no field {name}.{hint}")
    try:
        config = kind(**arguments, **more)
    except (TypeError, ValueError, ImportError) as error:
        raise InputError(f"peft: {shown(recipe.peft)}: {first_line(error)}.") from error
    if getattr(config, "num_virtual_tokens", 0) is None:
        example = shown({**recipe.peft, "num_virtual_tokens": 20})
        raise InputError(
            f"peft: {shown(recipe.peft)}: how many learned tokens stand before a row? Write peft: {example}."
        )
    return config


def import_peft(recipe: Recipe) -> Any:
    """The package peft; None if `recipe` has no adapter. Raises MissingDependency."""
    if recipe.trains_base:
        return None
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingDependency("peft", None, f"adapter: {recipe.adapter}") from None
    return peft


def missing_targets(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """lora_targets that the model lacks, which building would raise only after other problems."""
    if recipe.trains_base or recipe.adapts_every_linear:
        return
    model = shapes_of(recipe, config)
    paths = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    missing = [
        name for name in recipe.lora_targets if not any(f".{path}".endswith(f".{name}") for path in paths)
    ]
    if missing:
        yield Problem(
            f"lora_targets: there is no {' and no '.join(missing)}",
            f"lora_targets: [{', '.join(_linear_layers(model))}]",
        )


def _linear_layers(model: nn.Module) -> list[str]:
    """The last names of the layers that can have an adapter, sorted."""
    return sorted(
        {
            name.rpartition(".")[2]
            for name, part in model.named_modules()
            if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"  # GPT-2's, of transformers
        }
        - {"lm_head"}
    )


def dropout_problems(recipe: Recipe, config: Any) -> Iterator[Problem]:
    """lora_dropout where peft has none, which building would raise only after other problems."""
    if recipe.adapter == "lora" and recipe.lora_dropout:
        try:
            with_adapter(recipe, shapes_of(recipe, config))
        except _CannotDrop:
            yield Problem(_cannot_drop(recipe), "lora_dropout: 0")
        except InputError:  # missing_targets yields it
            return


def _cannot_drop(recipe: Recipe) -> str:
    return (
        f"lora_dropout: {recipe.lora_dropout}: with lora_targets: {shown(recipe.lora_targets)} peft adapts "
        f"weights of {recipe.model} that are no linear layers, as a mixture's router and experts, and cannot "
        "drop their inputs"
    )


def _refuse_targets_without_adapter(recipe: Recipe, adapted: Any) -> None:
    """Raise InputError if one of the targets adapts no layer. peft only raises if none of them does."""
    config, tuner = adapted.peft_config["default"], adapted.base_model
    # all-linear adapts every linear layer (experts in 4 bit are none); a method with prompts adapts no layer
    every = recipe.adapts_every_linear and recipe.adapter != "ia3" and not recipe.peft
    if every or not hasattr(tuner, "targeted_module_names"):
        return
    found = [*tuner.targeted_module_names, *tuner.targeted_parameter_names]
    # by peft's own list, with its own names: a mixture's w1 and w3 are gate_up_proj
    modules = config.target_modules or ()
    targets = [modules] if isinstance(modules, str) else [*modules]
    targets += getattr(config, "target_parameters", None) or ()
    missing = [name for name in targets if not any(f".{path}".endswith(f".{name}") for path in found)]
    if missing:
        why = ", where experts stored in 4 bit cannot be adapted" if recipe.quantized else ""
        raise InputError(
            f"lora_targets: {shown(recipe.lora_targets)}: there is no {' and no '.join(missing)} to adapt in "
            f"{recipe.model}{why}. List names of its linear layers, for example [q_proj, v_proj]."
        )
