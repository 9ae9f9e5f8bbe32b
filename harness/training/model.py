"""From a recipe to the model, optimizer and contexts that a step needs: all toggles, in one fixed order.

Order: config, architecture with weights (quantized layer by layer), k-bit preparation, adapter, gradient
checkpointing, loss, host memory for parameters, compile, optimizer, scaler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from harness.errors import InputError, is_out_of_memory
from harness.recipe import Recipe, find_model_config
from harness.training.learned_positions import refuse_longer_sequences
from harness.training.model_config import first_line, load_config
from harness.training.refusals import (
    refuse_empty_weights,
    refuse_what_cannot_run,
    refuse_what_is_no_language_model,
)
from harness.training.step import Training
from harness.training.toggles.adapter import import_peft, with_adapter
from harness.training.toggles.fused_loss import fuse_loss
from harness.training.toggles.gradient_checkpointing import checkpoint_blocks
from harness.training.toggles.host_memory import on_host
from harness.training.toggles.offload_activations import OffloadedActivations
from harness.training.toggles.optimizer import build_optimizer
from harness.training.toggles.precision import DTYPES, autocast, build_scaler, weights_dtype
from harness.training.toggles.quantization import prepare_for_kbit

BUILD_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, LookupError, OSError, ImportError, RuntimeError),
    *(SafetensorError, UnpicklingError, EOFError),
)
"""What transformers, torch and safetensors raise for a config or a checkpoint that does not build."""


def build_training(recipe: Recipe, device: torch.device) -> Training:
    """Model, optimizer, scaler and contexts of `recipe`, on `device` (cuda, cpu, or meta: shapes only).

    Raises InputError for a config that does not build or a toggle that cannot work on `device`.
    """
    model = build_model(recipe, device)
    saved_tensors: Callable[[], AbstractContextManager[Any]] = nullcontext
    if "activations" in recipe.offload:
        saved_tensors = OffloadedActivations(model, device)
    return Training(
        model=model,
        optimizer=build_optimizer(recipe, model),
        scaler=build_scaler(recipe, device),
        autocast=autocast(recipe, device),
        saved_tensors=saved_tensors,
        stepping=on_host if "parameters" in recipe.offload else nullcontext,
        max_grad_norm=recipe.max_grad_norm,
    )


def import_libraries(recipe: Recipe) -> None:
    """Import now what building the model of `recipe` imports. Raises nothing that building would not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = load_config(recipe)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if recipe.adapter != "none":
        import_peft(recipe)


def build_model(recipe: Recipe, device: torch.device) -> Any:
    """The model of `recipe` in training mode with every toggle applied, weights on `device`."""
    config = load_config(recipe)
    refuse_what_cannot_run(recipe, config, device)
    refuse_what_is_no_language_model(recipe, config)
    torch.manual_seed(recipe.seed)
    host = "parameters" in recipe.offload
    with on_host() if host else nullcontext():  # a model that is offloaded may be larger than the device
        model = _adapted(recipe, config, torch.device("cpu") if host and device.type == "cuda" else device)
    refuse_longer_sequences(model, recipe.model, recipe.seq_len)
    if recipe.gradient_checkpointing:
        checkpoint_blocks(model)
    if recipe.loss == "fused_linear":
        fuse_loss(model)
    if host:
        from harness.training.toggles.offload_parameters import offload_parameters

        offload_parameters(model, device, DTYPES[recipe.compute_dtype] if recipe.mixed else None)
    model.train()
    if recipe.compile:
        model.compile()
    return model


def _adapted(recipe: Recipe, config: Any, device: torch.device) -> Any:
    """The weights on `device`, those of the base frozen when there is an adapter to train."""
    model = _with_weights(recipe, config, device)
    refuse_empty_weights(recipe, model)
    model.config.use_cache = False
    if recipe.upcast_for_kbit:
        prepare_for_kbit(model)
    elif recipe.adapter != "none":
        model.requires_grad_(False)
    if recipe.adapter != "none":
        model = with_adapter(recipe, model)
    return model


def _with_weights(recipe: Recipe, config: Any, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = weights_dtype(recipe, config)
    common = {
        "dtype": dtype,
        "attn_implementation": recipe.attention,
        "trust_remote_code": recipe.trust_remote_code,
    }
    try:
        if recipe.weights == "pretrained" and device.type != "meta":  # shapes need no checkpoint
            if find_model_config(recipe.model) is not None:
                raise InputError(
                    f"weights: pretrained: {recipe.model} is a config without weights. "
                    "Give model a checkpoint folder or a Hugging Face id, or set weights: random."
                )
            if recipe.quantization != "none":
                from harness.training.toggles.quantization import bitsandbytes_config

                common["quantization_config"] = bitsandbytes_config(recipe)
            model = AutoModelForCausalLM.from_pretrained(recipe.model, device_map={"": device}, **common)
            if recipe.quantization != "none":
                from harness.training.toggles.quantization import quantize_experts

                for module in model.modules():  # transformers has loaded a mixture's experts in 16 bit
                    quantize_experts(recipe, module)
            return model
        if recipe.quantization != "none":
            from harness.training.toggles.quantization import build_quantized

            return build_quantized(
                recipe, partial(AutoModelForCausalLM.from_config, config, **common), device
            )
        with device:
            return AutoModelForCausalLM.from_config(config, **common)
    except InputError:
        raise
    except BUILD_ERRORS as error:
        if is_out_of_memory(error):
            raise
        if "attn_implementation" in str(error):  # a checkpoint's own code
            raise InputError(
                f"attention: {recipe.attention}: {recipe.model} cannot run with it; set attention: eager."
            ) from error
        if isinstance(error, KeyError):
            raise InputError(
                f"model: {recipe.model} does not build: this transformers has nothing called {error}. "
                "Write it as the family's other configs do."
            ) from error
        raise InputError(
            f"model: {recipe.model} does not build: {first_line(error)}. Check the config's sizes "
            "(hidden_size a multiple of num_attention_heads, heads a multiple of key-value heads)."
        ) from error
