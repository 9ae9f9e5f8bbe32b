"""The recipes that are published rows of FSDP: FSDP2 with the same units, where the source had FSDP1."""

from typing import Any

MODELS = "benchmarks/published/models"
"""From the root of the repository, where the command runs: results name no machine's folder."""
CONFIGS = {
    "Llama-2-7B": "llama-2-7b",
    "Llama-2-70B": "llama-2-70b",
    "Yi-34B": f"{MODELS}/yi-34b.json",
    "Mistral-7B-v0.2": f"{MODELS}/mistral-7b-v0.2.json",
}
ANSWER_AI: dict[str, Any] = {
    "precision": "bf16",
    "adapter": "lora",
    "adapter_dtype": "base",
    "lora_rank": 64,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "lora_targets": ("k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"),
    "gradient_checkpointing": True,
    "weight_decay": 0.1,
}
"""AnswerDotAI/fsdp_qlora's train.py: the defaults of main, and lora_target_modules "all"."""
PEFT: dict[str, Any] = {
    "precision": "bf16",
    "adapter": "lora",
    "adapter_dtype": "base",
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.1,
    "gradient_checkpointing": True,
    "wrap": "accelerate",
    "max_grad_norm": 1.0,
}
"""peft's docs/source/accelerate/fsdp.md: its commands, and the Trainer's clipping."""
NF4 = {"quantization": "nf4", "double_quant": True}
GPUS = {
    "RTX 3090": "rtx-3090",
    "RTX 4090": "rtx-3090",
    "H100-80GB": "h100",
    "24GB+": "rtx-4090",
    None: "a100-80gb",
}
"""Names in the hardware table. Where the source names none: the smallest usual card on which it fits."""


def recipe_fields(row: dict[str, Any]) -> dict[str, Any] | None:
    """The recipe of a row; None if nothing here is the row's equivalent."""
    method: str = row["method"]
    if row["id"].startswith("fsdp_qlora/"):
        fields = ANSWER_AI | (NF4 if method.startswith("QLoRA") else {})
    elif row["id"].startswith("peft/fsdp"):
        fields = PEFT | (NF4 if method.startswith("QLoRA") else {})
    else:
        return None
    fields = fields | {
        "model": CONFIGS[row["model"]],
        "micro_batch_size": row["batch_per_gpu"],
        "seq_len": row["seq_len"],
    }
    if "ddp" in method:
        return fields | {"parallel": "ddp", "dp_replicate": row["gpus"], "wrap": "block"}
    offloaded = "CPU offload" in method
    return fields | {"parallel": "fsdp", "dp_shard": row["gpus"], "cpu_offload": offloaded}


def measured_process(row: dict[str, Any]) -> bool:
    """Whether the source read the memory of a process, with its CUDA context, and not the allocator's."""
    return row["id"].startswith("peft/")


def why_off(row: dict[str, Any]) -> str:
    """What the source's program did otherwise, and its bytes where they can be said."""
    logits = row["batch_per_gpu"] * row["seq_len"] * VOCABULARIES.get(row["model"], 32000) * 4 / 2**30
    day = f"transformers of the day kept the logits in fp32 through backward ({logits:.2f} GiB)"
    if row["id"].startswith("peft/"):
        return f"FSDP1: one flat buffer for each unit; {day}; NCCL's buffers are in the measurement"
    if "peak_allocated_gib" in row:
        day += f"; the source allocated {row['peak_allocated_gib']:.2f} GiB"
    if "ddp" in row["method"]:
        return f"FSDP1 with nothing divided, in the place of DDP and its buckets; {day}"
    return f"FSDP1: one flat buffer for each unit, which record_stream gives back late; {day}"


VOCABULARIES = {"Yi-34B": 64000}
