"""The rules (rules.py) of what a recipe's task excludes."""

from __future__ import annotations

from harness.recipe.rule import Rule

TASK_RULES: tuple[Rule, ...] = (
    Rule(
        ("dpo_reference", "task"),
        lambda r: r.dpo_reference != "computed" and not r.prefers,
        "only dpo has a reference; set task: dpo, or dpo_reference: computed",
    ),
    Rule(
        ("task", "loss"),
        lambda r: r.prefers and r.fused_loss,
        "TRL computes dpo's log-probabilities in chunks by kernels of its own and holds no logits; "
        "set loss: standard",
    ),
    Rule(
        ("task", "packing"),
        lambda r: r.prefers and r.packing,
        "an answer is a row of its own; set packing: false, or task: sft",
    ),
    Rule(
        ("task", "data"),
        lambda r: r.prefers and r.data != "synthetic",
        "no file of pairs is read yet; set data: synthetic",
    ),
    Rule(
        ("task", "lora_dropout"),
        lambda r: r.prefers and r.lora_dropout > 0,
        "TRL turns dropout off, for the model and its reference must differ by their weights alone; "
        "set lora_dropout: 0",
    ),
    Rule(
        ("task", "compile"),
        lambda r: r.prefers and r.compile,
        "the model is called with and without gradients, and the compiled step of that is not built here; "
        "set compile: false",
    ),
    Rule(
        ("task", "parallel"),
        lambda r: r.prefers and (r.fsdp or r.tensor_parallel),
        "no reference is divided among ranks here; set parallel: ddp, or task: sft",
    ),
    Rule(
        ("task", "offload"),
        lambda r: r.prefers and r.parameters_on_host,
        "the head's weight is taken without calling the head, which would not be on the GPU then; "
        "set offload: [optimizer]",
    ),
)
