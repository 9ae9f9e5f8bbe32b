"""The rules (rules.py) of what Liger's kernels exclude."""

from __future__ import annotations

from harness.recipe.rule import Rule

LIGER_RULES: tuple[Rule, ...] = (
    Rule(
        ("wrap", "loss"),
        lambda r: r.wrap != "block" and r.fused_loss,
        "Liger takes the head's weight without calling the head, whose own unit is not gathered then; "
        "set wrap: block, or loss: standard",
    ),
    Rule(
        ("parallel", "loss"),
        lambda r: r.tensor_parallel and r.fused_loss,
        "Liger's kernel knows no divided head; set loss: standard",
    ),
    Rule(
        ("kernels", "compile"),
        lambda r: r.by_liger and r.compile,
        "torch.compile writes such kernels itself; set compile: false, or kernels: standard",
    ),
    Rule(
        ("kernels", "parallel"),
        lambda r: r.by_liger and (r.fsdp or r.tensor_parallel),
        "nobody has looked at what Liger's kernels take of divided weights; set parallel: ddp, or kernels: "
        "standard",
    ),
)
