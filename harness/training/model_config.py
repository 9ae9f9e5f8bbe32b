"""The transformers config of a recipe's model, the class of the model, and the model on the meta device."""

import os
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from harness.architecture import check_counts, find_config, read_config
from harness.errors import InputError, first_line, nearest
from harness.recipe import Recipe, find_model_config, nearest_model
from harness.system import hub_or_cache, warn_of_trusted_code

MAPPINGS = {
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "ForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "": "MODEL_MAPPING",
}
"""By the end of a class' name, which says the head of its model: transformers' mapping from configs to such
classes. "" is of models without a head."""


def load_config(recipe: Recipe) -> Any:
    """The transformers config of `recipe.model`: a name in recipes/models, a path, or a Hugging Face id.

    Raises InputError naming the model if it is unknown, if its config is malformed, if it is no causal
    language model, or if transformers has it without a head for the task.
    """
    from transformers import AutoConfig
    from transformers.activations import ACT2FN
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if recipe.trust_remote_code:
        warn_of_trusted_code(recipe.model)
    path = find_config(recipe.model)
    if recipe.weights == "pretrained":
        _refuse_irregular_files(recipe.model)
    try:
        values = read_config(path)
        check_counts(values, str(path))
        on_hub = find_model_config(recipe.model) is None and not os.path.exists(
            os.path.expanduser(recipe.model)
        )
        if recipe.trust_remote_code and on_hub and "auto_map" in values:
            with hub_or_cache(recipe.model):
                config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=True)
        else:
            _refuse_unknown_type(values.get("model_type"), str(path))
            config = AutoConfig.for_model(**values)
        config.get_text_config()  # loop.batches_of needs it
    except InputError:
        raise
    except Exception as error:
        # transformers raises a dozen types here (OSError, ValueError, KeyError, its own), and all mean this
        raise InputError(
            f"model: {recipe.model}: no usable config ({first_line(error)}).{nearest_model(recipe.model)} "
            "Give a name from recipes/models, a config.json, a checkpoint folder or a Hugging Face id."
        ) from error
    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        hint = nearest(activation, list(ACT2FN)) or f" It knows {', '.join(ACT2FN)}."
        raise InputError(f"model: {recipe.model}: transformers has no hidden_act {activation!r:.60}.{hint}")
    known = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or sees(recipe, config)
    if not known and not recipe.trust_remote_code:
        raise InputError(f"model: {recipe.model}: {config.model_type} is not a causal language model.")
    if recipe.scores:
        config.num_labels = recipe.scores
        if type(config) not in models_of(recipe, config):
            raise InputError(
                f"model: {recipe.model}: transformers has no {config.model_type} with a head of scores, "
                "which task: reward and classification train; choose another model, like llama."
            )
    positions = getattr(config, "n_positions", None)  # the rows of a table, as GPT-2's
    if positions is not None and recipe.seq_len > positions:
        raise InputError(
            f"seq_len: {recipe.seq_len}: {recipe.model} has {positions} positions; set at most that."
        )
    return config


def sees(recipe: Recipe, config: Any) -> bool:
    """Whether the model is built as one of images and text. If its type is also a causal language model of
    text alone, it is where the recipe has images."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if config.model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES or config.is_encoder_decoder:
        return False
    return bool(recipe.images) or config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def has_tower(model: Any) -> bool:
    """Whether the class of `model` is one of images and text, even if it is one of text alone too."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()


def _head(recipe: Recipe, config: Any) -> str:
    """The key of MAPPINGS for the recipe's task."""
    if recipe.scores:
        return "ForSequenceClassification"
    if recipe.embeds:
        return ""
    return "ForImageTextToText" if sees(recipe, config) else "ForCausalLM"


def auto_model(recipe: Recipe, config: Any) -> Any:
    """transformers' auto class, which makes a model of any type with the head for the task."""
    import transformers

    return getattr(transformers, f"AutoModel{_head(recipe, config)}")


def models_of(recipe: Recipe, config: Any) -> Any:
    """transformers' mapping from the class of a config to that of its model with the task's head."""
    from transformers.models.auto import modeling_auto

    return getattr(modeling_auto, MAPPINGS[_head(recipe, config)])


def model_class(recipe: Recipe, config: Any) -> Any:
    """transformers' class of the model of `config` with the task's head; None for a checkpoint's code."""
    models = models_of(recipe, config)
    known = type(config) in models  # a test of its own: the mapping's `get` raises
    return models[type(config)] if known else None


def shapes_of(recipe: Recipe, config: Any) -> Any:
    """The model of `config` on the meta device. It takes no memory, and no observer sees its tensors."""
    with _disable_current_modes(), torch.device("meta"):
        model = auto_model(recipe, config).from_config(
            config, attn_implementation="eager", trust_remote_code=recipe.trust_remote_code
        )
        return model.to("meta")  # torch.FloatTensor(...) is on the CPU in any context


def _refuse_unknown_type(model_type: Any, origin: str) -> None:
    from transformers import CONFIG_MAPPING

    if not isinstance(model_type, str):
        raise InputError(
            f"model: {origin}: model_type is {model_type!r:.60}; it must name the model's family, for "
            "example llama."
        )
    if model_type not in CONFIG_MAPPING:
        hint = nearest(model_type, list(CONFIG_MAPPING)) or " Give one that it has, like llama."
        raise InputError(f"model: {origin}: this transformers has no model_type {model_type!r:.60}.{hint}")


def _refuse_irregular_files(model: str) -> None:
    """Raise InputError for a pipe or a device in a checkpoint folder: the libraries would wait for it."""
    folder = os.path.expanduser(model)
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if not entry.is_file() and not entry.is_dir() and os.path.exists(entry.path):
            raise InputError(f"model: {entry.path} is not a regular file. Remove it from the folder.")
