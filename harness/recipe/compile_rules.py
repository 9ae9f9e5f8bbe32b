"""Rules (rules.py) about a compiled model: what it excludes, and what it alone has."""

from harness.recipe.rule import Rule

COMPILE_RULES: tuple[Rule, ...] = (
    Rule(
        ("activation_memory_budget", "compile"),
        lambda r: r.activation_memory_budget < 1 and not r.compile,
        "it is the compiler's; set compile: true, or activation_memory_budget: 1",
    ),
    Rule(
        ("activation_memory_budget", "gradient_checkpointing"),
        lambda r: r.activation_memory_budget < 1 and r.gradient_checkpointing,
        "checkpointing says already what is kept; set gradient_checkpointing: false, or "
        "activation_memory_budget: 1",
    ),
    Rule(
        ("parallel", "compile"),
        lambda r: r.distributed and r.compile,
        "the compiled step of several ranks is not built here; set compile: false",
    ),
)
