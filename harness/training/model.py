"""Builds a recipe's model, optimizer and contexts for the step, with all toggles in one fixed order.

The order: config, architecture with weights (quantized layer by layer), k-bit preparation, adapter, gradient
checkpointing, loss, tiles of MLPs, host memory for parameters, compile, reference of pairs, ranks,
optimizer, scaler.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from harness.errors import InputError, first_line, is_out_of_memory
from harness.parallel import ALONE, Deferred, Ranks, divide, loaded_by_one_thread, summed_at_the_end
from harness.recipe import Recipe, find_model_config
from harness.system import hub_or_cache
from harness.training.failures import errors_explained
from harness.training.host_memory import on_host
from harness.training.learned_positions import refuse_longer_sequences
from harness.training.model_config import auto_model, load_config, model_class
from harness.training.refusals import (
    refuse_empty_weights,
    refuse_missing_weights,
    refuse_what_cannot_run,
    refuse_what_is_no_language_model,
)
from harness.training.step import Training, loss_of_model
from harness.training.toggles.adapter import import_peft, with_adapter
from harness.training.toggles.chunked_loss import chunk_loss, loss_by_trl
from harness.training.toggles.compile import compile_model
from harness.training.toggles.gradient_checkpointing import checkpoint_blocks
from harness.training.toggles.liger import fuse_loss, tile_mlps
from harness.training.toggles.offload_activations import saved_tensors
from harness.training.toggles.offload_parameters import built_where, parameters_to_host
from harness.training.toggles.optimizer import build_optimizer
from harness.training.toggles.precision import (
    as_loaded,
    autocast,
    build_scaler,
    multiply_in_fp8,
    weights_dtype,
)
from harness.training.toggles.preference import (
    give_trl_head,
    import_trl,
    loss_of_odds,
    loss_of_pairs,
    loss_of_rewards,
    reference_of,
)
from harness.training.toggles.quantization import (
    as_stored_bytes,
    build_random,
    prepare_for_kbit,
    quantize_experts,
    quantize_linear,
    quantized_experts,
    quantized_on_loading,
)
from harness.training.toggles.scores import (
    loss_of_embeddings,
    loss_of_scores,
    prepare_for_scores,
    without_scores,
)
from harness.training.toggles.vision import freeze_vision

DAMAGED = (SafetensorError, UnpicklingError, EOFError)
"""Errors of safetensors and torch for a file of weights that cannot be read."""
BUILD_ERRORS = (
    *(ValueError, TypeError, KeyError, AttributeError, LookupError, OSError, ImportError, RuntimeError),
    *DAMAGED,
)
"""Errors of transformers, torch and safetensors for a config or a checkpoint that does not build."""


def build_training(recipe: Recipe, device: torch.device, ranks: Ranks = ALONE) -> Training:
    """The model, optimizer, scaler and contexts of `recipe`, as this one of `ranks` has them. `device` is
    cuda, cpu, or meta for shapes only.

    Raises InputError for a config that does not build, and for a toggle that cannot work on `device`.
    """
    deferred = Deferred(device, quantize_linear) if recipe.fsdp or recipe.tensor_parallel else None
    model = build_model(recipe, device, deferred)
    if deferred is not None and not deferred.knows(model):
        deferred, model = None, build_model(recipe, device)
    reference = reference_of(recipe, model)
    give_trl_head(recipe, model, reference)
    with errors_explained(model):
        called = divide(recipe, model, ranks, device, deferred)
    return Training(
        model=model,
        optimizer=build_optimizer(recipe, model),
        scaler=build_scaler(recipe, device),
        loss=_loss(recipe, model, reference),
        reference=reference,
        autocast=autocast(recipe, device),
        saved_tensors=saved_tensors(recipe, model, device),
        stepping=on_host if recipe.steps_on_host else nullcontext,
        summing=summed_at_the_end(recipe, called),
        ranks=ranks,
        called=called,
        max_grad_norm=recipe.max_grad_norm,
    )


def _loss(recipe: Recipe, model: Any, reference: Any) -> Callable[[Any, Any, Any], Any]:
    if recipe.scores:
        return loss_of_scores(recipe)
    if recipe.embeds:
        return loss_of_embeddings(recipe)
    if recipe.prefers:
        return loss_of_pairs(recipe, model, reference)
    if recipe.by_odds:
        return loss_of_odds(recipe)
    if recipe.rewarded:
        return loss_of_rewards(recipe)
    return loss_by_trl if recipe.by_trl else loss_of_model


def import_libraries(recipe: Recipe) -> None:
    """Import now what building the model of `recipe` would import. Raises what building would raise."""
    model_class(recipe, load_config(recipe))
    import_peft(recipe)
    import_trl(recipe)


def build_model(recipe: Recipe, device: torch.device, deferred: Deferred | None = None) -> Any:
    """The model of `recipe` in training mode with every toggle applied. Its weights are on `device`; or, with
    `deferred`, they are not made yet, and `deferred` has recorded how to make them."""
    config = load_config(recipe)
    refuse_what_cannot_run(recipe, config, device)
    _built(recipe, partial(refuse_what_is_no_language_model, recipe, config))
    torch.manual_seed(recipe.seed)
    pretrained = recipe.weights == "pretrained"
    make = _from_checkpoint if pretrained and device.type != "meta" else _random  # shapes need no checkpoint
    if pretrained and make is _random and deferred is None and not recipe.parameters_on_host:
        make = _as_from_checkpoint
    where = built_where(recipe, device) if deferred is None else deferred.recording(loading=pretrained)
    with where as place:
        model = _built(recipe, partial(make, recipe, config, place, deferred is not None))
        if deferred is not None:
            deferred.left_out |= any(quantized_experts(recipe, module) for module in model.modules())
        refuse_empty_weights(recipe, model)
        model.config.use_cache = model.config.get_text_config().use_cache = False
        prepare_for_scores(recipe, model)
        prepare_for_kbit(recipe, model)
        freeze_vision(recipe, model)
        model = with_adapter(recipe, model)
    multiply_in_fp8(recipe, model, device)
    refuse_longer_sequences(model, recipe.model, recipe.seq_len)
    checkpoint_blocks(recipe, model)
    fuse_loss(recipe, model)
    tile_mlps(recipe, model)
    chunk_loss(recipe, model)
    parameters_to_host(recipe, model, device)
    model.train()
    compile_model(recipe, model)
    return model


def _from_checkpoint(recipe: Recipe, config: Any, device: torch.device, later: bool) -> Any:
    if find_model_config(recipe.model) is not None or os.path.isfile(recipe.model):
        raise InputError(
            f"weights: pretrained: {recipe.model} is a config without weights. "
            "Give model a checkpoint folder or a Hugging Face id, or set weights: random."
        )
    options = {**_options(recipe, config), **quantized_on_loading(recipe), "device_map": {"": device}}
    with hub_or_cache(recipe.model), loaded_by_one_thread() if later else nullcontext():
        model, loaded = auto_model(recipe, config).from_pretrained(
            recipe.model, output_loading_info=True, **options
        )
    refuse_missing_weights(recipe, without_scores(recipe, loaded["missing_keys"]))
    if not later:
        for module in model.modules():  # transformers has loaded a mixture's experts in 16 bit
            quantize_experts(recipe, module)
    return model


def _as_from_checkpoint(recipe: Recipe, config: Any, device: torch.device, later: bool) -> Any:
    """A model of shapes, made with the allocations of from_pretrained: it takes as many bytes as the model
    needs at once and gives them back (transformers/modeling_utils.py, caching_allocator_warmup), and then
    makes one tensor after the other, by name, without a weight for a head that is tied."""
    deferred = Deferred(device, quantize_linear)
    with deferred.recording(loading=True) as place:
        model = _random(recipe, config, place, later=True)
    if not deferred.knows(model):
        return _random(recipe, config, device, later)
    sizes = [as_stored_bytes(recipe, tensor) for tensor in [*model.parameters(), *model.buffers()]]
    torch.empty(int(sum(sizes)) // 2, dtype=torch.float16, device=device)
    holders = [part for _, part in sorted(model.named_modules()) if not [*part.children()]]
    deferred.maker(model)([*holders, model])
    for module in [] if later else list(model.modules()):
        quantize_experts(recipe, module)
    return model


def _random(recipe: Recipe, config: Any, device: torch.device, later: bool) -> Any:
    def build() -> Any:
        return as_loaded(auto_model(recipe, config).from_config(config, **_options(recipe, config)))

    return build_random(recipe, build, device, later=later)


def _options(recipe: Recipe, config: Any) -> dict[str, Any]:
    """The arguments that transformers' from_config and from_pretrained both get."""
    return {
        "dtype": weights_dtype(recipe, config),
        "attn_implementation": recipe.attention,
        "trust_remote_code": recipe.trust_remote_code,
    }


def _built(recipe: Recipe, build: Callable[[], Any]) -> Any:
    """What `build` makes. Raises InputError for a config or a checkpoint that does not build."""
    try:
        return build()
    except InputError:
        raise
    except BUILD_ERRORS as error:
        if is_out_of_memory(error):
            raise
        if "attn_implementation" in str(error):  # raised by a checkpoint's own code
            raise InputError(
                f"attention: {recipe.attention}: {recipe.model} cannot run with it; set attention: eager."
            ) from error
        if isinstance(error, KeyError):
            raise InputError(
                f"model: {recipe.model} does not build: this transformers has nothing called {error}. "
                "Write it as the family's other configs do."
            ) from error
        if isinstance(error, DAMAGED):
            raise InputError(
                f"model: {recipe.model}: a file of its weights cannot be read: {first_line(error)}. It is "
                "damaged or not whole: get it again."
            ) from error
        if isinstance(error, OSError) and recipe.weights == "pretrained":
            raise InputError(
                f"weights: pretrained: model: {recipe.model} gives none: {first_line(error)}. Add its files "
                "of weights (model.safetensors), or set weights: random."
            ) from error
        raise InputError(
            f"model: {recipe.model} does not build: {first_line(error)}. Check the config's sizes "
            "(hidden_size a multiple of num_attention_heads, heads a multiple of key-value heads)."
        ) from error
