"""Rules (rules.py) about losses that never hold all logits, about Liger's kernels, and what they exclude."""

from harness.recipe.rule import Rule

LIGER_RULES: tuple[Rule, ...] = (
    Rule(
        ("wrap", "loss"),
        lambda r: r.wrap != "block" and r.loss != "standard",
        "it takes the head's weight without calling the head, whose own unit is not gathered then; "
        "set wrap: block, or loss: standard",
    ),
    Rule(
        ("parallel", "loss"),
        lambda r: r.tensor_parallel and r.loss != "standard",
        "it knows no divided head; set loss: standard",
    ),
    Rule(
        ("loss", "precision"),
        lambda r: r.chunked_loss and (r.mixed or r.scaled),
        "autocast does not know it, and its fp16 cannot hold GradScaler's scale; set precision: bf16, or "
        "loss: fused_linear",
    ),
    Rule(
        ("loss", "offload"),
        lambda r: r.loss in ("linear_cross_entropy", "fused_lm_head") and r.parameters_on_host,
        "it takes the head's weight without calling the head, whose weight is on the host then; "
        "set offload: [optimizer]",
    ),
    Rule(
        ("loss", "compile"),
        lambda r: r.loss in ("linear_cross_entropy", "fused_lm_head") and r.compile,
        "torch.compile leaves it as it is, and the step around it is not built here; set compile: false, or "
        "loss: standard",
    ),
    Rule(
        ("loss", "packing"),
        lambda r: r.loss == "fused_lm_head" and r.packing,
        "TRL takes the states of tokens with a label alone, as many as documents leave, which no shape says; "
        "set packing: false, or loss: fused_linear",
    ),
    Rule(
        ("loss", "parallel"),
        lambda r: r.loss in ("linear_cross_entropy", "fused_lm_head") and r.fsdp,
        "nobody has looked at the head's weight where it is divided; set parallel: ddp, or loss: standard",
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
