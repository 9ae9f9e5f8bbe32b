"""Napkin's answer to published peaks: the recipe of a training run."""

from pathlib import Path
from typing import Any

from harness.hardware.hardware import Hardware
from harness.napkin.prediction import estimate
from harness.recipe.recipe import Recipe

"""Configs as transformers would have them; LitGPT's phi-1.5 computes GELU's tanh form in one kernel."""
MODELS = Path(__file__).parent / "models"
LITGPT_MODELS = {
    "phi-1.5": str(MODELS / "phi-1.5.json"),
    "StableLM-base-alpha-3b": str(MODELS / "stablelm-base-alpha-3b.json"),
    "Llama-2-7B": "llama-2-7b",
    "Llama-2-13B": "llama-2-13b",
}
QUERY_AND_VALUE = {"phi-1.5": ("q_proj", "v_proj"), "StableLM-base-alpha-3b": ("query_key_value",)}
"""LitGPT adapts parts of one weight; the GPT-NeoX of transformers, too, has one weight for all three."""


def litgpt_recipe(case: dict[str, Any]) -> Recipe:
    """The recipe of a LoRA run of LitGPT's table (finetune/lora.py)."""
    return Recipe(
        model=LITGPT_MODELS[case["model"]],
        precision="bf16",
        adapter="lora",
        lora_rank=8,
        lora_alpha=16,
        lora_dropout=0.05,
        lora_targets=QUERY_AND_VALUE.get(case["model"], ("q_proj", "v_proj")),
        adapter_dtype="base",
        micro_batch_size=case["batch"],
        seq_len=case["max_seq"],
    )


def training_run(case: dict[str, Any], hardware: Hardware) -> int:
    """Peak bytes of a LoRA run."""
    return estimate(litgpt_recipe(case), hardware).peak.total_bytes
