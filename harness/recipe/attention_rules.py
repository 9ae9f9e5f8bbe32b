"""Rules (rules.py) about the implementation of attention, and what it excludes."""

from harness.recipe.rule import Rule

ATTENTION_RULES: tuple[Rule, ...] = (
    Rule(
        ("attention", "precision"),
        lambda r: r.flash_package and r.compute_dtype == "fp32",
        "flash attention computes in 16 bit only; set precision: bf16, or attention: sdpa",
    ),
    Rule(
        ("attention", "seq_len"),
        lambda r: r.flex and r.seq_len < 128,
        "of fewer than 128 tokens it makes another kernel, that of decoding, which nobody has looked at; set "
        "seq_len: 128, or attention: sdpa",
    ),
    Rule(
        ("packing", "attention"),
        lambda r: r.packing and r.flash_package and r.micro_batch_size > 1,
        "flash attention takes packed documents as one row; set micro_batch_size: 1 (and a longer seq_len)",
    ),
)
