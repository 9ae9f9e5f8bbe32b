"""Rules (rules.py) about optimizers of other packages than torch, and what cannot be set with them."""

from harness.recipe.rule import Rule

OPTIMIZER_RULES: tuple[Rule, ...] = (
    Rule(
        ("optimizer", "adapter"),
        lambda r: r.low_rank_optimizer and not r.trains_base,
        "an adapter's matrices are of low rank already; set optimizer: adamw, or adapter: none",
    ),
    Rule(
        ("optimizer", "precision"),
        lambda r: r.optimizer == "apollo_adamw" and r.precision == "fp16",
        "apollo-torch adds 1e-8 where it divides by the norm of a gradient's channel, which is 0 in fp16, "
        "and a channel without a gradient becomes nan; set precision: bf16 or fp16-mixed",
    ),
    Rule(
        ("optimizer_rank", "optimizer"),
        lambda r: r.optimizer_rank != 128 and not r.low_rank_optimizer,
        "no gradient is projected; set optimizer: galore_adamw, or optimizer_rank: 128",
    ),
    Rule(
        ("checkpoint_every", "optimizer"),
        lambda r: r.checkpoint_every > 0 and (r.low_rank_optimizer or r.by_torchao),
        "its state has objects of the package, which no checkpoint is read back with; set "
        "checkpoint_every: 0, or optimizer: adamw",
    ),
)
