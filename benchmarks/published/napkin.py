"""Napkin's answer to published peaks: the recipe of a training run, or the arithmetic of one module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.architecture.model_shape import ModelShape
from harness.hardware.hardware import Hardware
from harness.napkin.memory.liveness import Backward, forward_peak
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.prediction import estimate
from harness.napkin.tape.blocks import mlp, new_tape
from harness.napkin.tape.linear import linear
from harness.napkin.tape.loss import cross_entropy
from harness.napkin.tape.ops import norm
from harness.napkin.tape.tape import Tape, Tensor, saved_storages, total_bytes
from harness.recipe.fields import Precision
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


def module(case: dict[str, Any], hardware: Hardware) -> int:
    """Peak bytes of one of Hugging Face's modules in Liger's benchmark (set-ups: published_kernels.py).

    Inputs and weights lie there, with their gradients of the round before, and so does what the set-up left.
    """
    kernel = case["id"].split("/")[1]
    price = {
        "cross_entropy": _cross_entropy,
        "fused_linear_cross_entropy": _head_and_loss,
        "geglu": _gated_mlp,
        "rms_norm": _rms_norm,
        "swiglu": _gated_mlp,
    }[kernel]
    workspaces = hardware.cublas_workspace_bytes if price in (_head_and_loss, _gated_mlp) else 0
    return price(case["config"], int(case["x"]["value"]), hardware) + workspaces


def _cross_entropy(config: dict[str, Any], vocab: int, hardware: Hardware) -> int:
    tape, _ = _empty(hardware, config["B"], config["T"], vocab=vocab)
    logits = tape.tensor("logits", "B S V", "fp32", grad=True)
    cross_entropy(tape, logits)
    return 2 * logits.size_bytes + _largest(tape, [logits])


def _head_and_loss(config: dict[str, Any], rows: int, hardware: Hardware) -> int:
    tape, built = _empty(hardware, 1, rows, hidden=config["H"], vocab=config["V"])
    states = tape.tensor("states", "B S H", "bf16", grad=True)
    logits = linear(tape, built, states, built.head, "logits", "B S V")
    cross_entropy(tape, logits)
    weight = 2 * config["H"] * config["V"]
    unused = weight
    return 2 * (states.size_bytes + weight) + unused + _largest(tape, [states])


def _rms_norm(config: dict[str, Any], hidden: int, hardware: Hardware) -> int:
    tape, built = _empty(hardware, 1, config["M"], hidden=hidden, precision="fp32")
    x = tape.tensor("x", "B S H", "bf16", grad=True)
    y = norm(tape, built, x, "norm")
    weight, dy = 4 * hidden, x.size_bytes
    unused = weight
    return 2 * (x.size_bytes + weight) + unused + dy + 2 * y.size_bytes + _largest(tape, [x], retained=True)


def _gated_mlp(config: dict[str, Any], length: int, hardware: Hardware) -> int:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    tape, built = _empty(
        hardware, config.get("B") or config["bsz"], length, hidden=hidden, intermediate=intermediate
    )
    x = tape.tensor("x", "B S H", "bf16", grad=True)
    y = mlp(tape, built, x)
    weights = 2 * 3 * hidden * intermediate
    return 2 * (x.size_bytes + weights + y.size_bytes) + _largest(tape, [x], retained=True)


def _empty(
    hardware: Hardware,
    rows: int,
    length: int,
    hidden: int = 1,
    intermediate: int = 1,
    vocab: int = 1,
    precision: Precision = "bf16",
) -> tuple[Tape, BuiltModel]:
    """A tape for one module of a Llama with these sizes."""
    shape = ModelShape(
        "llama", vocab, hidden, 1, 1, 1, hidden, intermediate, False, "silu", rotary_dim=hidden
    )
    recipe = Recipe(model="none", precision=precision, micro_batch_size=rows, seq_len=length)
    built = BuiltModel(recipe, shape)
    return new_tape(built, hardware.gpu_threads), built


def _largest(tape: Tape, inputs: list[Tensor], retained: bool = False) -> int:
    """The most that is alive beside `inputs`, in forward or in backward, with gradients of the round before.

    `retained`: the benchmark's backward has retain_graph=True, and lets go of nothing that forward kept.
    """
    inside = {id(t) for t in inputs}
    kept = [t for t in saved_storages(tape.ops) if retained and id(t) not in inside]
    backward = Backward(tape.ops, [*inputs, *kept], accumulates=True).run()
    return max(forward_peak(tape.ops, inputs).size_bytes, backward.size_bytes + total_bytes(kept))
