"""One small model trained for a few steps: on the CPU, on the virtual GPU, and simulated."""

import base64
import math
from pathlib import Path
from typing import Any

from benchmarks.causal_models.tiny import LORA_TARGETS
from benchmarks.causal_models.vision import VISION_METHODS
from benchmarks.gpu_programme.recipes import Spec
from benchmarks.gpu_programme.tasks import Context, Result
from benchmarks.gpu_programme.trace_file import load_trace
from benchmarks.gpu_programme.traces import record
from harness.architecture import with_attention
from harness.recipe import Recipe, check_recipe

SIZES = {"micro_batch_size": 4, "seq_len": 128, "weights": "random", "data": "synthetic"}
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"adapter": "lora", "gradient_checkpointing": True}}
"""Fields of a recipe: full fine-tuning in bf16, and LoRA on all linear layers with checkpointing."""
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MORE_METHODS: dict[str, dict[str, Any]] = {
    "rslora": {"adapter": "lora", "use_rslora": True},
    "dora": {"adapter": "lora", "use_dora": True},
    "dora dropout": {
        "adapter": "lora",
        "use_dora": True,
        "lora_dropout": 0.1,
        "gradient_checkpointing": True,
    },
    "dora nf4": {"adapter": "lora", "use_dora": True, "quantization": "nf4"},
    "lora+": {"adapter": "lora", "lora_plus_ratio": 16},
    "lora+ fused": {"adapter": "lora", "lora_plus_ratio": 16, "optimizer_impl": "fused"},
    "muon": {"optimizer": "muon"},
    "muon fp32": {"optimizer": "muon", "precision": "fp32"},
    "selective": {"gradient_checkpointing": True, "selective_checkpointing": True},
    "selective lora": {"adapter": "lora", "gradient_checkpointing": True, "selective_checkpointing": True},
    "checkpoints on the host": {"gradient_checkpointing": True, "offload": ["checkpoints"]},
    "checkpoints on the host lora": {
        "adapter": "lora",
        "gradient_checkpointing": True,
        "offload": ["checkpoints"],
        "precision": "bf16-mixed",
    },
    "selective eager": {
        "gradient_checkpointing": True,
        "selective_checkpointing": True,
        "attention": "eager",
    },
    "flex": {"attention": "flex_attention", "seq_len": 256},
    "flex packing": {"attention": "flex_attention", "packing": True, "seq_len": 384},
    "flex lora": {
        "attention": "flex_attention",
        "seq_len": 256,
        "adapter": "lora",
        "gradient_checkpointing": True,
    },
    "flex mixed": {"attention": "flex_attention", "precision": "bf16-mixed", "seq_len": 200},
    "schedule free": {"optimizer": "adamw_schedule_free"},
    "schedule free for_loop": {"optimizer": "adamw_schedule_free", "optimizer_impl": "for_loop"},
    "apollo": {"optimizer": "apollo_adamw", "optimizer_rank": 32},
    "apollo in backward": {"optimizer": "apollo_adamw", "optimizer_rank": 32, "optimizer_in_backward": True},
    "torchao 8bit": {"optimizer": "adamw_torch_8bit"},
    "torchao 4bit": {"optimizer": "adamw_torch_4bit"},
    "torchao 8bit fp32": {"optimizer": "adamw_torch_8bit", "precision": "fp32"},
    "fp8": {"fp8": True},
    "fp8 mixed": {"fp8": True, "precision": "bf16-mixed"},
    "fp8 checkpointing": {"fp8": True, "gradient_checkpointing": True, "optimizer": "adamw_8bit"},
    "galore": {"optimizer": "galore_adamw", "optimizer_rank": 32},
    "muon lora": {"adapter": "lora", "optimizer": "muon"},
    "dpo": {"task": "dpo"},
    "dpo precomputed": {"task": "dpo", "dpo_reference": "precomputed"},
    "dpo mixed": {"task": "dpo", "precision": "bf16-mixed"},
    "dpo checkpointing": {"task": "dpo", "gradient_checkpointing": True, "optimizer": "adamw_8bit"},
    "dpo lora": {"task": "dpo", "adapter": "lora", "gradient_checkpointing": True},
    "dpo nf4": {"task": "dpo", "adapter": "lora", "quantization": "nf4"},
    "liger": {"kernels": "liger"},
    "liger lora": {"kernels": "liger", "adapter": "lora", "gradient_checkpointing": True},
    "liger fused mixed": {"kernels": "liger", "loss": "fused_linear", "precision": "bf16-mixed"},
    "liger experts": {"kernels": "liger"},
    "tiles": {"mlp_tiles": 4},
    "tiles checkpointing": {"mlp_tiles": 3, "gradient_checkpointing": True, "kernels": "liger"},
    "tiles lora": {"mlp_tiles": 4, "adapter": "lora", "gradient_checkpointing": True},
    "tiles nf4": {"mlp_tiles": 2, "adapter": "lora", "quantization": "nf4"},
    "linear_cross_entropy": {"loss": "linear_cross_entropy"},
    "linear_cross_entropy fp32": {"loss": "linear_cross_entropy", "precision": "fp32"},
    "linear_cross_entropy lora": {
        "loss": "linear_cross_entropy",
        "adapter": "lora",
        "gradient_checkpointing": True,
    },
    "fused_lm_head": {"loss": "fused_lm_head"},
    "fused_lm_head mixed": {"loss": "fused_lm_head", "precision": "bf16-mixed"},
    "fused_lm_head lora": {"loss": "fused_lm_head", "adapter": "lora", "gradient_checkpointing": True},
    "kto": {"task": "kto"},
    "kto precomputed": {"task": "kto", "dpo_reference": "precomputed"},
    "kto mixed": {"task": "kto", "precision": "bf16-mixed"},
    "kto lora": {"task": "kto", "adapter": "lora", "gradient_checkpointing": True},
    "orpo": {"task": "orpo"},
    "orpo mixed": {"task": "orpo", "precision": "bf16-mixed"},
    "orpo lora": {"task": "orpo", "adapter": "lora", "gradient_checkpointing": True},
    "grpo": {"task": "grpo"},
    "grpo mixed": {"task": "grpo", "precision": "bf16-mixed"},
    "grpo lora": {"task": "grpo", "adapter": "lora", "gradient_checkpointing": True},
    "grpo reference": {"task": "grpo", "grpo_beta": 0.04},
    "grpo reference lora": {"task": "grpo", "grpo_beta": 0.04, "adapter": "lora"},
    "reward": {"task": "reward"},
    "reward mixed": {"task": "reward", "precision": "bf16-mixed"},
    "reward lora": {"task": "reward", "adapter": "lora", "gradient_checkpointing": True},
    "embedding": {"task": "embedding"},
    "embedding mixed": {"task": "embedding", "precision": "bf16-mixed"},
    "embedding lora": {"task": "embedding", "adapter": "lora", "gradient_checkpointing": True},
    "classification": {"task": "classification", "num_labels": 5},
    "classification lora": {"task": "classification", "adapter": "lora", "gradient_checkpointing": True},
    "classification nf4": {"task": "classification", "adapter": "lora", "quantization": "nf4"},
    "experts": {"adapter": "lora", "lora_targets": ["q_proj", "v_proj"], "peft": EXPERTS},
    "vera": {"adapter": "peft", "peft": {"peft_type": "VERA", "r": 64}},
    "loha": {"adapter": "peft", "peft": {"peft_type": "LOHA", "r": 8}},
    "lokr": {"adapter": "peft", "peft": {"peft_type": "LOKR", "r": 8}},
    "oft": {"adapter": "peft", "peft": {"peft_type": "OFT", "oft_block_size": 32}},
    "boft": {"adapter": "peft", "peft": {"peft_type": "BOFT", "boft_block_size": 32}},
    "adalora": {"adapter": "peft", "peft": {"peft_type": "ADALORA", "total_step": 100}},
    "fourierft": {"adapter": "peft", "peft": {"peft_type": "FOURIERFT", "n_frequency": 100}},
    "ln_tuning": {"adapter": "peft", "lora_targets": ["input_layernorm"], "peft": {"peft_type": "LN_TUNING"}},
    "prompt_tuning": {"adapter": "peft", "peft": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8}},
    "tinylora": {"adapter": "peft", "peft": {"peft_type": "TINYLORA"}},
    "vblora": {
        "adapter": "peft",
        "peft": {"peft_type": "VBLORA", "num_vectors": 16, "vector_length": 64},
    },
    "waveft": {"adapter": "peft", "peft": {"peft_type": "WAVEFT", "n_frequency": 100}},
    "gaussian": {"adapter": "lora", "peft": {"init_lora_weights": "gaussian"}},
    "orthogonal": {"adapter": "lora", "peft": {"init_lora_weights": "orthogonal"}},
    "pissa": {"adapter": "lora", "peft": {"init_lora_weights": "pissa"}},
    "pissa base": {"adapter": "lora", "adapter_dtype": "base", "peft": {"init_lora_weights": "pissa"}},
    "olora": {"adapter": "lora", "peft": {"init_lora_weights": "olora"}},
    "olora nf4": {"adapter": "lora", "quantization": "nf4", "peft": {"init_lora_weights": "olora"}},
    "mica": {"adapter": "lora", "peft": {"init_lora_weights": "mica"}},
    "rank pattern": {"adapter": "lora", "peft": {"rank_pattern": {"q_proj": 64}}},
}
"""Other methods, each of which one type shows: a mixture for experts, llama for the others."""
NEED_A_GPU = [
    name
    for name, fields in MORE_METHODS.items()
    if "kernels" in fields or fields.get("attention") == "flex_attention"
]
"""Those whose kernels Triton compiles, for GPUs alone."""
ALL_METHODS = METHODS | MORE_METHODS | VISION_METHODS
UNKNOWN = "what these operators take inside on CUDA nobody has looked at: "


def recipe_of(config: Path, method: str) -> Recipe:
    """The recipe of one row, which leaves the attention to the model."""
    fields = {"model": str(config), **SIZES, **ALL_METHODS[method]}
    targets = LORA_TARGETS.get(config.stem)
    if targets and "adapter" in fields:
        fields["lora_targets"] = targets
    return with_attention(check_recipe(fields, method))


def train_on_cpu(context: Context, config: str, method: str) -> Result:
    """Whether the step runs on the CPU, with real numbers: its losses."""
    import torch

    from harness.measure.cpu import CpuObserver
    from harness.training.loop import run_steps, set_up

    recipe = recipe_of(Path(config), method)
    device, observer = torch.device("cpu"), CpuObserver(follow_first_step=False)
    training, batches = set_up(recipe, device, observer)
    steps = run_steps(training, batches, device, ["timed", "timed"], observer)
    losses = [float(step.loss) for step in steps]
    return {"losses": [loss if math.isfinite(loss) else None for loss in losses]}


def emulate(context: Context, config: str, method: str, trace: str) -> Result:
    """Three steps on the virtual GPU: every action of PyTorch's allocator goes to the file `trace`."""
    result = record(context, Spec(Path(config).stem, None, recipe_of(Path(config), method).model_dump()))
    Path(trace).write_bytes(base64.b64decode(result.pop("trace")))
    return {"status": result["status"], "actions": result["events"]}


def simulate_beside(context: Context, trace: str) -> Result:
    """The simulation of a recorded step, and its peaks beside those of PyTorch's allocator."""
    from benchmarks.traces import compared, hardware_of

    recorded = load_trace(Path(trace))
    found = compared(recorded, hardware_of(recorded))
    peaks = found.peaks()
    unknown = [line.removeprefix(UNKNOWN) for line in found.profile.warnings if line.startswith(UNKNOWN)]
    return {
        "emulated": {name: real for name, (real, _) in peaks.items()},
        "simulated": {name: ours for name, (_, ours) in peaks.items()},
        "apart": {name: (ours or 0) - (real or 0) for name, (real, ours) in peaks.items()},
        "same_requests": found.same_requests,
        "unknown": unknown[0].split(", ") if unknown else [],
    }
