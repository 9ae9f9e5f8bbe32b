"""Pairs of recipe fields that cannot work together, each with the reason and the fix.

The first broken rule is reported; its message names both fields and what to change.
"""

from typing import Any, cast

from harness.recipe.attention_rules import ATTENTION_RULES
from harness.recipe.compile_rules import COMPILE_RULES
from harness.recipe.derived import Derived
from harness.recipe.fp8_rules import FP8_RULES
from harness.recipe.liger_rules import LIGER_RULES
from harness.recipe.optimizer_rules import OPTIMIZER_RULES
from harness.recipe.rule import Rule
from harness.recipe.task_rules import TASK_RULES
from harness.recipe.vision_rules import VISION_RULES

RULES: tuple[Rule, ...] = (
    Rule(
        ("quantization", "adapter"),
        lambda r: r.quantized and r.trains_base,
        "quantized weights cannot be trained; set adapter: lora, or quantization: none",
    ),
    Rule(
        ("double_quant", "quantization"),
        lambda r: r.double_quant and not r.four_bit,
        "only 4-bit scales are quantized again; set quantization: nf4, or double_quant: false",
    ),
    Rule(
        ("upcast_for_kbit", "quantization"),
        lambda r: r.upcast_for_kbit and not r.quantized,
        "there is no quantized base to prepare; set quantization: nf4, or upcast_for_kbit: false",
    ),
    Rule(
        ("quantization", "precision"),
        lambda r: r.quantization == "int8" and r.precision == "fp32",
        "bitsandbytes' int8 product runs in 16 bit; set precision: bf16 or fp16",
    ),
    Rule(
        ("master_weights", "precision"),
        lambda r: r.master_weights and r.precision not in ("bf16", "fp16"),
        "the weights are fp32 already or autocast keeps them so; set precision: bf16 or fp16, "
        "or master_weights: false",
    ),
    Rule(
        ("master_weights", "adapter"),
        lambda r: r.master_weights and not r.trains_base and r.adapter_dtype == "fp32",
        "the trained adapter weights are fp32 already; set master_weights: false, or adapter_dtype: base",
    ),
    Rule(
        ("adapter_dtype", "precision"),
        lambda r: not r.trains_base and r.adapter_dtype == "base" and r.scaled and not r.master_weights,
        "fp16 adapter gradients cannot be unscaled without losing the small ones; set adapter_dtype: fp32",
    ),
    Rule(
        ("adapter", "quantization"),
        lambda r: (
            r.adapter == "ia3" and r.quantized and r.precision in ("bf16", "fp16") and not r.upcast_for_kbit
        ),
        "peft's ia3 returns fp32 from a quantized layer, and the next one is 16 bit; "
        "set upcast_for_kbit: true, or adapter: lora",
    ),
    Rule(
        ("selective_checkpointing", "gradient_checkpointing"),
        lambda r: r.selective_checkpointing and not r.gradient_checkpointing,
        "it chooses what checkpointing keeps; set gradient_checkpointing: true, or "
        "selective_checkpointing: false",
    ),
    Rule(
        ("selective_checkpointing", "offload"),
        lambda r: r.selective_checkpointing and r.blocks_on_host,
        "what is kept beside the inputs of blocks cannot go to the host; set "
        "selective_checkpointing: false, or offload: []",
    ),
    Rule(
        ("offload", "gradient_checkpointing"),
        lambda r: r.checkpoints_on_host and not r.gradient_checkpointing,
        "checkpoints are what checkpointing keeps; set gradient_checkpointing: true, or offload: []",
    ),
    Rule(
        ("offload", "offload"),
        lambda r: r.activations_on_host and r.checkpoints_on_host,
        "checkpoints are among the activations; set offload: [checkpoints], or offload: [activations]",
    ),
    *ATTENTION_RULES,
    Rule(
        ("optimizer_impl", "optimizer"),
        lambda r: (
            r.optimizer_impl != "foreach" and (r.by_bitsandbytes or r.low_rank_optimizer or r.by_torchao)
        ),
        "its package has one implementation; leave optimizer_impl: foreach, or set optimizer: adamw",
    ),
    Rule(
        ("optimizer_impl", "optimizer"),
        lambda r: r.optimizer_impl == "fused" and r.optimizer == "adafactor",
        "torch has no fused Adafactor; set optimizer_impl: foreach",
    ),
    Rule(
        ("optimizer_impl", "optimizer"),
        lambda r: r.optimizer_impl == "fused" and r.optimizer == "adamw_schedule_free",
        "schedulefree has no fused step; set optimizer_impl: foreach, or optimizer: adamw",
    ),
    Rule(
        ("optimizer_in_backward", "gradient_accumulation_steps"),
        lambda r: r.optimizer_in_backward and r.gradient_accumulation_steps > 1,
        "a gradient is freed as soon as it is used, so none can accumulate; "
        "set gradient_accumulation_steps: 1 (and a larger micro_batch_size)",
    ),
    Rule(
        ("optimizer_in_backward", "max_grad_norm"),
        lambda r: r.optimizer_in_backward and r.max_grad_norm is not None,
        "the global norm needs every gradient at once and they are freed one by one; set max_grad_norm: null",
    ),
    Rule(
        ("optimizer_in_backward", "precision"),
        lambda r: r.optimizer_in_backward and r.scaled,
        "GradScaler must see every gradient before the first weight changes; set precision: bf16",
    ),
    Rule(
        ("optimizer_in_backward", "master_weights"),
        lambda r: r.optimizer_in_backward and r.master_weights,
        "the fp32 copy is stepped when every gradient is there, and they are freed one by one; "
        "set master_weights: false, or optimizer_in_backward: false",
    ),
    Rule(
        ("optimizer_in_backward", "offload"),
        lambda r: r.optimizer_in_backward and r.optimizer_on_host,
        "the gradients are needed together on the host; set optimizer_in_backward: false",
    ),
    Rule(
        ("offload", "optimizer"),
        lambda r: r.optimizer_on_host and (r.by_bitsandbytes or r.by_torchao),
        "its package steps on the GPU; set optimizer: adamw "
        "(without offload, paged_adamw_8bit pages its own state to the host)",
    ),
    Rule(
        ("offload", "quantization"),
        lambda r: r.parameters_on_host and r.quantized,
        "a quantized weight cannot leave the GPU without its scales; set quantization: none, "
        "or offload: [activations]",
    ),
    Rule(
        ("offload", "offload"),
        lambda r: {"optimizer", "parameters"} <= set(r.offload),
        "parameters on the host take the optimizer with them; set offload: [parameters]",
    ),
    Rule(
        ("offload", "master_weights"),
        lambda r: r.parameters_on_host and r.master_weights,
        "offloaded parameters are the only copy; set master_weights: false, or offload: [optimizer]",
    ),
    Rule(
        ("offload", "precision"),
        lambda r: r.parameters_on_host and r.scaled,
        "GradScaler unscales on the GPU and the gradients are on the host; set precision: bf16",
    ),
    Rule(
        ("offload", "compile"),
        lambda r: bool(r.offload) and r.compile,
        "the transfers are Python hooks, which compile cannot trace; set compile: false",
    ),
    Rule(
        ("lora_targets", "adapter"),
        lambda r: not r.trains_base and r.lora_targets == (),
        "an adapter needs at least one module; set lora_targets: all-linear",
    ),
    Rule(
        ("dp_shard", "parallel"),
        lambda r: r.dp_shard > 1 and not r.fsdp,
        "only fsdp divides a copy of the model among ranks that train on rows of their own (of ddp, "
        "dp_replicate is the number of GPUs); set parallel: fsdp, or dp_shard: 1",
    ),
    Rule(
        ("dp_replicate", "parallel"),
        lambda r: r.dp_replicate > 1 and r.parallel in ("none", "tp"),
        "copies of the model train together by ddp (or fsdp); set parallel: ddp, or dp_replicate: 1",
    ),
    Rule(
        ("tp", "parallel"),
        lambda r: r.tp > 1 and not r.tensor_parallel,
        "only tensor parallelism divides a layer; set parallel: tp (beside dp_shard, fsdp+tp), or tp: 1",
    ),
    Rule(
        ("reshard_after_forward", "parallel"),
        lambda r: not r.reshard_after_forward and not r.fsdp,
        "nothing is gathered in forward; set parallel: fsdp, or reshard_after_forward: true",
    ),
    Rule(
        ("reduce_dtype", "parallel"),
        lambda r: r.reduce_dtype is not None and not r.fsdp,
        "gradients are summed in their own dtype, if at all; set parallel: fsdp, or reduce_dtype: null",
    ),
    Rule(
        ("sync_each_micro_batch", "parallel"),
        lambda r: not r.sync_each_micro_batch and r.parallel in ("none", "tp"),
        "no gradients are summed over ranks; set parallel: ddp, or sync_each_micro_batch: true",
    ),
    Rule(
        ("wrap", "parallel"),
        lambda r: r.wrap != "block" and not r.fsdp,
        "nothing is gathered unit by unit; set parallel: fsdp, or wrap: block",
    ),
    Rule(
        ("cpu_offload", "parallel"),
        lambda r: r.cpu_offload and not r.fsdp,
        "it is FSDP's own (on one GPU, offload: [parameters] is the like); "
        "set parallel: fsdp, or cpu_offload: false",
    ),
    Rule(
        ("parallel", "offload"),
        lambda r: r.distributed and r.optimizer_on_host,
        "offload moves the weights and optimizer of one GPU, and with fsdp it is cpu_offload that does; "
        "set offload: [], or parallel: none",
    ),
    Rule(
        ("parallel", "offload"),
        lambda r: r.activations_on_host and (r.fsdp or r.tensor_parallel),
        "weights that are gathered or divided would be taken for activations; "
        "set offload: [], or parallel: none",
    ),
    Rule(
        ("parallel", "optimizer_in_backward"),
        lambda r: r.distributed and r.optimizer_in_backward,
        "a gradient is not summed over ranks yet when it arrives; set optimizer_in_backward: false",
    ),
    *COMPILE_RULES,
    Rule(
        ("parallel", "optimizer"),
        lambda r: r.by_bitsandbytes and (r.fsdp or r.tensor_parallel),
        "bitsandbytes' optimizers do not know PyTorch's divided tensors (DTensor), on the GPU or off it; "
        "set optimizer: adamw, or parallel: none",
    ),
    Rule(
        ("parallel", "optimizer"),
        lambda r: r.optimizer == "adafactor" and (r.fsdp or r.tensor_parallel),
        "PyTorch cannot form Adafactor's means of rows and columns over a divided weight; "
        "set optimizer: adamw, or parallel: ddp",
    ),
    Rule(
        ("parallel", "optimizer_impl"),
        lambda r: r.optimizer == "sgd" and r.optimizer_impl == "fused" and (r.fsdp or r.tensor_parallel),
        "PyTorch's fused SGD does not know divided weights (DTensor); "
        "set optimizer_impl: foreach, or parallel: ddp",
    ),
    Rule(
        ("parallel", "quantization"),
        lambda r: r.quantized and r.tensor_parallel,
        "bitsandbytes packs a weight's rows and columns together, and no layer can be divided by them; "
        "set parallel: fsdp, or quantization: none",
    ),
    Rule(
        ("parallel", "quantization"),
        lambda r: r.quantization == "int8" and r.fsdp,
        "the scales of an int8 weight are lost when it is divided; set quantization: nf4, or parallel: ddp",
    ),
    Rule(
        ("cpu_offload", "precision"),
        lambda r: r.cpu_offload and r.scaled,
        "GradScaler unscales on the GPU, and cpu_offload keeps the gradients on the host; "
        "set precision: bf16, or cpu_offload: false",
    ),
    *LIGER_RULES,
    *FP8_RULES,
    Rule(
        ("use_dora", "adapter"),
        lambda r: r.use_dora and r.adapter != "lora",
        "the lengths are trained beside LoRA's matrices; set adapter: lora, or use_dora: false",
    ),
    Rule(
        ("use_rslora", "adapter"),
        lambda r: r.use_rslora and r.adapter != "lora",
        "only LoRA's product is scaled by its rank; set adapter: lora, or use_rslora: false",
    ),
    Rule(
        ("lora_plus_ratio", "adapter"),
        lambda r: r.lora_plus_ratio is not None and r.adapter != "lora",
        "it is about LoRA's two matrices; set adapter: lora, or lora_plus_ratio: null",
    ),
    Rule(
        ("lora_plus_ratio", "optimizer_in_backward"),
        lambda r: r.lora_plus_ratio is not None and r.optimizer_in_backward,
        "each weight has an optimizer of its own there; set lora_plus_ratio: null, or "
        "optimizer_in_backward: false",
    ),
    Rule(
        ("lora_plus_ratio", "master_weights"),
        lambda r: r.lora_plus_ratio is not None and r.master_weights,
        "copies of the weights are stepped, which are in one group; set master_weights: false, or "
        "lora_plus_ratio: null",
    ),
    Rule(
        ("lora_plus_ratio", "offload"),
        lambda r: r.lora_plus_ratio is not None and r.optimizer_on_host,
        "copies of the weights are stepped, which are in one group; set offload: [], or "
        "lora_plus_ratio: null",
    ),
    Rule(
        ("optimizer", "lora_plus_ratio"),
        lambda r: r.by_muon and r.lora_plus_ratio is not None,
        "Muon's learning rate follows the shape of each matrix; set lora_plus_ratio: null, or "
        "optimizer: adamw",
    ),
    Rule(
        ("optimizer", "optimizer_in_backward"),
        lambda r: r.by_muon and r.optimizer_in_backward,
        "Muon and AdamW divide the weights when all are there; set optimizer_in_backward: false, or "
        "optimizer: adamw",
    ),
    Rule(
        ("optimizer", "master_weights"),
        lambda r: (r.by_muon or r.low_rank_optimizer) and r.master_weights,
        "copies are stepped, of which nobody knows which are matrices within the model; set "
        "master_weights: false, or optimizer: adamw",
    ),
    Rule(
        ("optimizer", "offload"),
        lambda r: (r.by_muon or r.low_rank_optimizer) and r.optimizer_on_host,
        "its products would take hours on the host; set offload: [], or optimizer: adamw",
    ),
    Rule(
        ("parallel", "optimizer"),
        lambda r: (r.optimizer == "adamw_schedule_free" or r.by_torchao) and (r.fsdp or r.tensor_parallel),
        "its step over divided weights was not tried here; set optimizer: adamw, or parallel: ddp",
    ),
    Rule(
        ("parallel", "optimizer"),
        lambda r: (r.by_muon or r.low_rank_optimizer) and (r.fsdp or r.tensor_parallel),
        "it needs whole matrices, and ranks hold parts; set optimizer: adamw, or parallel: ddp",
    ),
    Rule(
        ("peft", "adapter"),
        lambda r: bool(r.peft) and r.adapter == "none",
        "there is no adapter that these fields are of; set adapter: lora, or peft: {}",
    ),
    Rule(
        ("peft", "adapter"),
        lambda r: r.adapter in ("lora", "ia3") and "peft_type" in r.peft,
        "peft_type names a method beside lora and ia3; set adapter: peft, or peft: {}",
    ),
    Rule(
        ("adapter", "peft"),
        lambda r: r.adapter == "peft" and "peft_type" not in r.peft,
        "which method of peft it is must be said; set peft: {peft_type: VERA}, or adapter: lora",
    ),
    Rule(
        ("parallel", "use_dora"),
        lambda r: r.tensor_parallel and r.use_dora,
        "there is no plan that divides DoRA's lengths; set use_dora: false, or parallel: fsdp",
    ),
    Rule(
        ("parallel", "peft"),
        lambda r: r.tensor_parallel and bool(r.peft),
        "there is no plan that divides what peft's own fields add; set parallel: fsdp, or parallel: ddp",
    ),
    Rule(
        ("parallel", "adapter"),
        lambda r: r.tensor_parallel and r.adapter == "ia3",
        "there is no plan that divides ia3's scales; set adapter: lora",
    ),
    *OPTIMIZER_RULES,
    *TASK_RULES,
    *VISION_RULES,
)


def first_broken_rule(recipe: Derived) -> str | None:
    """The message of the first rule that `recipe` breaks, with both fields' values; None without one."""
    for rule in RULES:
        if rule.broken(recipe):
            # two values of one field (offload with offload) name it once
            names = dict.fromkeys(rule.fields)
            pair = " with ".join(f"{name}: {shown(getattr(recipe, name))}" for name in names)
            return f"{pair} is impossible: {rule.message}"
    return None


def shown(value: object) -> str:
    """A field's value as a recipe file spells it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(str, cast("list[Any]", value))) + "]"
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{name}: {shown(each)}" for name, each in pairs) + "}"
    return "null" if value is None else str(value)
