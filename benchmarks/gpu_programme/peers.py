"""Part "peers": the harness beside transformers.Trainer and TRL, in turns, each run in its own process."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.gpu_programme.recipes import Spec
from benchmarks.gpu_programme.tasks import LIGER_IS_TRITON, Context, Piece, Result, modules_of
from harness.recipe.recipe import Recipe

ROUNDS = 2
STEPS: dict[str, Any] = {"warmup_steps": 3, "steps": 10, "seq_len": 1024}
RECIPES = {
    "1b-bf16": Spec("1b-bf16", "llama-3.2-1b-bf16", STEPS | {"micro_batch_size": 4}),
    "8b-lora": Spec("8b-lora", "llama-3.1-8b-lora", STEPS | {"micro_batch_size": 2}),
    "8b-nf4-lora": Spec(
        "8b-nf4-lora", "llama-3.1-8b-lora", STEPS | {"quantization": "nf4", "double_quant": True}
    ),
    "1b-bf16-mixed": Spec("1b-bf16-mixed", "llama-3.2-1b-bf16-mixed", STEPS | {"max_grad_norm": 1.0}),
    "1b-fused-linear": Spec("1b-fused-linear", "llama-3.2-1b-fused-linear", STEPS | {"micro_batch_size": 4}),
}
SFT = ("1b-fused-linear", "1b-bf16", "8b-lora")
"""TRL's loss is a fused one of its own, whatever the recipe says: hold it against the first of these."""


def pieces(context: Context) -> list[Piece]:
    """harness, trainer and sft-trainer in turns: twice each, so that neither has the colder device."""
    made = []
    for number in range(1, ROUNDS + 1):
        for name in RECIPES:
            for contender in ("harness", "trainer", *(("sft-trainer",) if name in SFT else ())):
                recipe = _recipe(name, contender, tiny=context.tiny)
                made.append(
                    Piece(
                        f"{name}.{contender}.{number}",
                        contend,
                        {"name": name, "contender": contender},
                        (*modules_of(recipe), *(("trl", "datasets") if contender == "sft-trainer" else ())),
                        gpu_only=LIGER_IS_TRITON if recipe.loss == "fused_linear" else None,
                    )
                )
    return made


def contend(context: Context, name: str, contender: str) -> Result:
    """One run of one contender."""
    import torch

    from benchmarks.speed import peers

    runs = {"harness": peers.by_harness, "trainer": peers.by_trainer, "sft-trainer": peers.by_sft_trainer}
    recipe = _recipe(name, contender, tiny=context.tiny)
    measured = runs[contender](recipe, torch.device(context.device))
    return {"recipe": name, "contender": contender, **measured}


def ratios(results: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The harness over each other contender, by recipe: step time and peak memory (None if unknown)."""
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        if result["status"] == "ok":
            run = result["result"]
            runs.setdefault((run["recipe"], run["contender"]), []).append(run)
    rows = []
    for (recipe, contender), theirs in runs.items():
        ours = runs.get((recipe, "harness"))
        if contender == "harness" or not ours:
            continue
        row: dict[str, Any] = {"recipe": recipe, "contender": contender}
        for quantity, name in (
            ("median_step_s", "step_time"),
            ("peak_allocated_bytes", "peak_allocated"),
            ("peak_reserved_bytes", "peak_reserved"),
        ):
            known = all(run[quantity] is not None for run in (*ours, *theirs))
            row[name] = _median(ours, quantity) / _median(theirs, quantity) if known else None
        rows.append(row)
    return rows


def _recipe(name: str, contender: str, *, tiny: bool) -> Recipe:
    recipe = RECIPES[name].recipe(tiny=tiny)
    # SFTTrainer replaces the head's forward itself
    return recipe.model_copy(update={"loss": "standard"}) if contender == "sft-trainer" else recipe


def _median(runs: Iterable[Mapping[str, Any]], quantity: str) -> float:
    return statistics.median(run[quantity] for run in runs)
