"""Rules (rules.py) about losses that never hold all logits, Liger's kernels and its tiles of an MLP."""

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
    Rule(
        ("mlp_tiles", "precision"),
        lambda r: r.tiles_mlps and r.mixed,
        "what is computed again in backward is outside of autocast; set precision: bf16, or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "lora_dropout"),
        lambda r: r.tiles_mlps and not r.trains_base and r.lora_dropout > 0,
        "what is computed again in backward would drop other values; set lora_dropout: 0, or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "adapter"),
        lambda r: r.tiles_mlps and r.adapter not in ("none", "lora"),
        "nobody has looked at the method within a tile; set adapter: lora, or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "lora_targets"),
        lambda r: r.tiles_mlps and r.adapter == "lora" and not r.adapts_every_linear,
        "a tile trains nothing where its input needs no gradient, as before the first adapted layer; set "
        "lora_targets: all-linear, or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "optimizer_in_backward"),
        lambda r: r.tiles_mlps and r.optimizer_in_backward,
        "a weight's gradient is whole after the last tile alone; set optimizer_in_backward: false, or "
        "mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "offload"),
        lambda r: r.tiles_mlps and r.parameters_on_host,
        "a weight would visit the GPU again for each tile; set offload: [optimizer], or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "fp8"),
        lambda r: r.tiles_mlps and r.fp8,
        "each tile would have a scale of its own; set fp8: false, or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "compile"),
        lambda r: r.tiles_mlps and r.compile,
        "torch.compile cannot trace a backward within a backward; set compile: false, or mlp_tiles: 1",
    ),
    Rule(
        ("mlp_tiles", "parallel"),
        lambda r: r.tiles_mlps and r.parallel != "none",
        "a gradient is summed over ranks when it arrives, which it does once a tile; set parallel: none, or "
        "mlp_tiles: 1",
    ),
)
