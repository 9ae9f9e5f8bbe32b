"""From a recipe to the model, optimizer and contexts that a step needs: all toggles, in one fixed order.

Order: config, architecture with weights (quantized layer by layer), k-bit preparation, adapter, gradient
checkpointing, loss, host memory for parameters, compile, optimizer, scaler.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.config_check import check_counts, read_config
from harness.console import warn_of_trusted_code
from harness.errors import InputError, MissingDependency, is_out_of_memory
from harness.offload import OffloadedActivations, on_host
from harness.optimizer import build_optimizer, build_scaler
from harness.recipe import Recipe
from harness.recipe_check import nearest
from harness.recipe_file import find_model_config, nearest_model
from harness.recipe_rules import shown
from harness.step import Training

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
        autocast=_autocast(recipe, device),
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
        _peft(recipe)


def build_model(recipe: Recipe, device: torch.device) -> Any:
    """The model of `recipe` in training mode with every toggle applied, weights on `device`."""
    config = load_config(recipe)
    _refuse_what_cannot_run(recipe, config, device)
    torch.manual_seed(recipe.seed)
    host = "parameters" in recipe.offload
    with on_host() if host else nullcontext():  # a model that is offloaded may be larger than the device
        model = _adapted(recipe, config, torch.device("cpu") if host and device.type == "cuda" else device)
    if recipe.gradient_checkpointing:
        _checkpoint_blocks(model)
    if recipe.loss == "fused_linear":
        _fuse_loss(model)
    if host:
        from harness.offload_parameters import offload_parameters

        offload_parameters(model, device, DTYPES[recipe.compute_dtype] if recipe.mixed else None)
    model.train()
    if recipe.compile:
        model.compile()
    return model


def _adapted(recipe: Recipe, config: Any, device: torch.device) -> Any:
    """The weights on `device`, those of the base frozen when there is an adapter to train."""
    model = _with_weights(recipe, config, device)
    model.config.use_cache = False
    if recipe.upcast_for_kbit:
        prepare_for_kbit(model)
    elif recipe.adapter != "none":
        model.requires_grad_(False)
    if recipe.adapter != "none":
        model = _with_adapter(recipe, model)
    return model


def load_config(recipe: Recipe) -> Any:
    """The transformers config of `recipe.model`: a name in recipes/models, a path, or a Hugging Face id.

    Raises InputError naming the model if it is unknown, malformed or not a causal language model.
    """
    from transformers import AutoConfig
    from transformers.activations import ACT2FN
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if recipe.trust_remote_code:
        warn_of_trusted_code(recipe.model)
    named = find_model_config(recipe.model)
    path = named or Path(recipe.model).expanduser()
    if named is None and path.is_dir():
        path = path / "config.json"
    try:
        if path.is_file():
            values = read_config(path)
            check_counts(values, str(path))
            _refuse_unknown_type(values.get("model_type"), str(path))
            config = AutoConfig.for_model(**values)
        elif path.suffix == ".json" or path.name == "config.json" or recipe.model.startswith((".", "/", "~")):
            raise InputError(
                f"model: {recipe.model}: there is no such file. Give a config.json or a checkpoint folder."
            )
        else:
            config = AutoConfig.from_pretrained(recipe.model, trust_remote_code=recipe.trust_remote_code)
    except InputError:
        raise
    except Exception as error:
        # transformers raises a dozen types here (OSError, ValueError, KeyError, its own); all mean this.
        raise InputError(
            f"model: {recipe.model}: no usable config ({_first_line(error)}).{nearest_model(recipe.model)} "
            "Give a name from recipes/models, a config.json, a checkpoint folder or a Hugging Face id."
        ) from error
    activation = getattr(config, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        hint = nearest(activation, list(ACT2FN)) or f" It knows {', '.join(ACT2FN)}."
        raise InputError(f"model: {recipe.model}: transformers has no hidden_act {activation!r:.60}.{hint}")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not recipe.trust_remote_code:
        raise InputError(f"model: {recipe.model}: {config.model_type} is not a causal language model.")
    positions = getattr(config, "n_positions", None)  # learned, not computed: GPT-2 has no more
    if positions is not None and recipe.seq_len > positions:
        raise InputError(
            f"seq_len: {recipe.seq_len}: {recipe.model} has {positions} positions; set at most that."
        )
    return config


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


def weights_dtype(recipe: Recipe, config: Any) -> torch.dtype:
    """The dtype the model's own weights are made in.

    Plain precisions: that dtype. Under autocast: fp32, but a frozen base stays as its config declares it.
    """
    if not recipe.mixed:
        return DTYPES[recipe.precision]
    declared = getattr(config, "dtype", None) if recipe.adapter != "none" else None
    if isinstance(declared, str):
        declared = getattr(torch, declared)
    return declared or torch.float32


def attention_kernel(model: Any) -> str:
    """The attention implementation the built model uses, as transformers names it."""
    return str(model.config._attn_implementation)


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
                from harness.quantize import bitsandbytes_config

                common["quantization_config"] = bitsandbytes_config(recipe)
            model = AutoModelForCausalLM.from_pretrained(recipe.model, device_map={"": device}, **common)
            if recipe.quantization != "none":
                from harness.quantize import quantize_experts

                for module in model.modules():  # transformers has loaded a mixture's experts in 16 bit
                    quantize_experts(recipe, module)
            return model
        if recipe.quantization != "none":
            from harness.quantize import build_quantized

            return build_quantized(
                recipe, partial(AutoModelForCausalLM.from_config, config, **common), device
            )
        with device:
            return AutoModelForCausalLM.from_config(config, **common)
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OSError, ImportError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        if "attn_implementation" in str(error):
            raise InputError(
                f"attention: {recipe.attention}: {recipe.model} cannot run with it; set attention: eager."
            ) from error
        if isinstance(error, KeyError):
            raise InputError(
                f"model: {recipe.model} does not build: this transformers has nothing called {error}. "
                "Write it as the family's other configs do."
            ) from error
        raise InputError(
            f"model: {recipe.model} does not build: {_first_line(error)}. Check the config's sizes "
            "(hidden_size a multiple of num_attention_heads, heads a multiple of key-value heads)."
        ) from error


def prepare_for_kbit(model: Any) -> None:
    """peft's: every 16-bit weight left becomes fp32."""
    from peft import prepare_model_for_kbit_training

    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _with_adapter(recipe: Recipe, model: Any) -> Any:
    """peft's model: the frozen base with LoRA (A Kaiming, B zero) or IA3 weights to train."""
    peft = _peft(recipe)
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
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=recipe.adapter_dtype == "fp32")  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(f"lora_targets: {shown(recipe.lora_targets)}: {_first_line(error)}.") from error
    _refuse_targets_without_adapter(recipe, adapted)
    return adapted


def _peft(recipe: Recipe) -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise MissingDependency("peft", None, f"adapter: {recipe.adapter}") from None
    return peft


def _refuse_targets_without_adapter(recipe: Recipe, adapted: Any) -> None:
    """Raise InputError if a target adapts nothing; peft says so only when none of them does."""
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


def _checkpoint_blocks(model: Any) -> None:
    # Non-reentrant: it stops recomputing early and needs no input that requires a gradient.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.2x
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=how)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def _fuse_loss(model: Any) -> None:
    """Replace the model's forward by Liger's, which computes the loss from the hidden states in chunks."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError:
        raise MissingDependency("liger-kernel", "liger", "loss: fused_linear") from None
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise InputError(
            f"loss: fused_linear: Liger has no {base.config.model_type} model; set loss: standard."
        )
    only_the_loss = {
        "rope": False,
        "rms_norm": False,
        "cross_entropy": False,
        "fused_linear_cross_entropy": True,
    }
    gate = "geglu" if base.config.model_type.startswith("gemma") else "swiglu"
    _apply_liger_kernel_to_instance(base, **only_the_loss, **{gate: False})


def _autocast(recipe: Recipe, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    if not recipe.mixed:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=DTYPES[recipe.compute_dtype])


def _refuse_what_cannot_run(recipe: Recipe, config: Any, device: torch.device) -> None:
    """Raise InputError for a toggle whose kernels `device` or this installation does not have."""
    if recipe.attention == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
        # transformers before 5.23 runs it all the same, and leaves the capping out
        raise InputError(
            f"attention: sdpa: {config.model_type} caps its attention scores, which sdpa cannot; "
            "set attention: eager."
        )
    if device.type == "meta":  # nothing runs
        return
    on_gpu = device.type != "cpu"
    if recipe.attention.startswith("flash_attention"):
        if not on_gpu:
            raise InputError(f"attention: {recipe.attention} needs an NVIDIA GPU; set attention: sdpa.")
        from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

        two = recipe.attention == "flash_attention_2"
        if not (is_flash_attn_2_available() if two else is_flash_attn_3_available()):
            # without this, transformers would fetch a kernel from the Hub
            raise MissingDependency(
                "flash-attn" if two else "flash-attn-3", "flash-attn", f"attention: {recipe.attention}"
            )
    if recipe.loss == "fused_linear" and not on_gpu and not _triton_interprets():
        raise InputError(
            "loss: fused_linear runs Liger's Triton kernels, which need a GPU; set loss: standard."
        )


def _triton_interprets() -> bool:
    import os

    return os.environ.get("TRITON_INTERPRET") == "1"


def _first_line(error: Exception) -> str:
    """What an error says: its first line, and the second if the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = f"{lines[0]} {lines[1]}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return said.rstrip(".")
