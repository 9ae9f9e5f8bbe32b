"""Rules (rules.py) about products in fp8, and what cannot be set with them."""

from harness.recipe.rule import Rule

FP8_RULES: tuple[Rule, ...] = (
    Rule(
        ("fp8", "adapter"),
        lambda r: r.fp8 and not r.trains_base,
        "torchao computes the gradient of every weight that it multiplies in fp8, and a frozen one has none; "
        "set fp8: false, or adapter: none",
    ),
    Rule(
        ("fp8", "precision"),
        lambda r: r.fp8 and r.compute_dtype != "bf16",
        "products in fp8 have results in bf16; set precision: bf16 or bf16-mixed, or fp8: false",
    ),
    Rule(
        ("fp8", "selective_checkpointing"),
        lambda r: r.fp8 and r.selective_checkpointing,
        "what is multiplied in fp8 is not among the products that it keeps; set selective_checkpointing: "
        "false, or fp8: false",
    ),
    Rule(
        ("fp8", "parallel"),
        lambda r: r.fp8 and r.tensor_parallel,
        "layers that are divided among ranks multiply in bf16; set fp8: false",
    ),
    Rule(
        ("fp8", "dpo_reference"),
        lambda r: r.fp8 and r.copies_reference and not r.rewarded,
        "whether the copy that is compared with multiplies in fp8 too is each trainer's own choice; set "
        "dpo_reference: precomputed, or fp8: false",
    ),
    Rule(
        ("fp8", "grpo_beta"),
        lambda r: r.fp8 and r.copies_reference and r.rewarded,
        "whether the reference multiplies in fp8 too is each trainer's own choice; set grpo_beta: 0, or "
        "fp8: false",
    ),
    Rule(
        ("fp8", "images"),
        lambda r: r.fp8 and r.images > 0,
        "the image tower's layers would multiply in fp8 too, for which nobody has looked; set fp8: false",
    ),
)
