"""The recipes of the hardware programme, in order of worth, and small twins of them for the CPU."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.errors import InputError
from harness.recipe.check import check_recipe
from harness.recipe.file import find_model_config, load_recipe
from harness.recipe.recipe import Recipe

SHORT: dict[str, Any] = {"warmup_steps": 2, "steps": 3}
"""Few steps: the spread between them is below a percent, and time on a GPU is short."""
TINY: dict[str, Any] = {"model": "tiny-llama-bytes", "seq_len": 32, "warmup_steps": 1, "steps": 1}
LONGEST_TINY_BATCH = 2


@dataclass(frozen=True)
class Spec:
    """A recipe of the recipes folder (or the defaults with a model), with some fields changed."""

    name: str
    source: str | None
    fields: dict[str, Any] = field(default_factory=dict)
    layers: int | None = None
    """Cut the model to this many layers: the same sizes, less of it."""
    environment: dict[str, str] = field(default_factory=dict)
    room_bytes: int | None = None
    """No more of the device's memory than this, by a setting of the allocator."""

    def recipe(self, *, tiny: bool = False) -> Recipe:
        """The Recipe, with the whole model. Tiny: the same toggles on a small llama."""
        base = load_recipe(self.source)[1].model_dump() if self.source else {}
        fields = {**base, **self.fields}
        if tiny:
            batch = min(fields.get("micro_batch_size", 1), LONGEST_TINY_BATCH)
            shortest = {"seq_len": 128} if fields.get("attention") == "flex_attention" else {}
            fields |= TINY | {"micro_batch_size": batch, "data": "synthetic"} | shortest
        return check_recipe(fields, self.name)


def with_layers(recipe: Recipe, layers: int | None, folder: Path) -> Recipe:
    """`recipe` with its named model cut to `layers`, its config written to `folder`; unchanged for None."""
    if layers is None:
        return recipe
    path = folder / f"{recipe.model}-{layers}-layers.json"
    path.write_text(json.dumps({**named_config(recipe.model), "num_hidden_layers": layers}))
    return recipe.model_copy(update={"model": str(path)})


def named_config(name: str) -> dict[str, Any]:
    """The config of a model in recipes/models. Raises InputError if there is none of that name."""
    path = find_model_config(name)
    if path is None:
        raise InputError(f"there is no model {name} in recipes/models.")
    return json.loads(path.read_bytes())


def _one(name: str, environment: dict[str, str] | None = None, **fields: Any) -> Spec:
    sizes = {"model": "llama-3.2-1b", "micro_batch_size": 2, "seq_len": 1024}
    return Spec(f"1b-{name}", None, sizes | fields, environment=environment or {})


def _two(name: str, **fields: Any) -> Spec:
    sizes = {"model": "llama-3.1-8b", "micro_batch_size": 2, "seq_len": 1024}
    return Spec(f"8b-2-layers-{name}", None, sizes | fields, layers=2)


_LORA: dict[str, Any] = {"adapter": "lora", "learning_rate": 2e-4}
_QLORA = _LORA | {"quantization": "nf4", "double_quant": True, "gradient_checkpointing": True}

TRACES = (
    _one("bf16"),
    _one("lora-dropout", **_LORA, lora_dropout=0.1),
    _two("nf4-lora", **_QLORA),
    _one("fp16-mixed-clipped", precision="fp16-mixed", max_grad_norm=1.0),
    _one("bf16-fused", optimizer_impl="fused"),
    _two("checkpointing-clipped", gradient_checkpointing=True, max_grad_norm=1.0),
    _two(
        "nf4-lora-upcast",
        **_QLORA,
        precision="bf16-mixed",
        upcast_for_kbit=True,
        lora_dropout=0.1,
        optimizer="paged_adamw",
        max_grad_norm=0.3,
    ),
    _one("fp32", precision="fp32"),
    _one("bf16-mixed-checkpointing", precision="bf16-mixed", gradient_checkpointing=True),
    _two("eager", attention="eager"),
    _one("fused-linear", loss="fused_linear"),
    _two("adamw-8bit", optimizer="adamw_8bit"),
    _two("in-backward", optimizer_in_backward=True),
    _two("offload-activations", **_LORA, offload=["activations"]),
    _two("offload-optimizer", offload=["optimizer"]),
    _two("offload-parameters", offload=["parameters"]),
    _two("lora-accumulation", **_LORA, gradient_checkpointing=True, gradient_accumulation_steps=2),
    _two("fp16-master-weights", precision="fp16", master_weights=True, max_grad_norm=1.0),
    _two("int8-lora", **_LORA, quantization="int8"),
    _two("packing", packing=True),
    _two("packing-flash-attention", packing=True, attention="flash_attention_2", micro_batch_size=1),
    _one("flex-attention-lora", **_LORA, attention="flex_attention"),
    _two("flex-attention", attention="flex_attention", gradient_checkpointing=True),
    Spec("mixtral-1-layer-nf4-lora", "mixtral-qlora", {"seq_len": 1024}, layers=1),
    Spec("gpt2-medium", None, {"model": "gpt2-medium", "micro_batch_size": 4, "seq_len": 512}),
    _one("bf16-expandable-segments", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    # More than this recipe allocates and less than it reserves: cached segments must be given back.
    replace(_one("bf16-little-memory"), room_bytes=15_300_000_000),
)
"""Small but real: every toggle that changes what is allocated, and two settings of the allocator."""


def _full_size(source: str, suffix: str = "", **fields: Any) -> Spec:
    return Spec(source + suffix, source, SHORT | fields)


VALIDATE = (
    *map(
        _full_size,
        (
            "llama-3.1-8b-lora",
            "llama-3.1-8b-qlora",
            "llama-3.1-8b-full-bf16",
            "mistral-7b-qlora",
            "qwen2.5-7b-lora",
            "gemma-2-2b-lora",
            "tinyllama-lora",
            "gpt2-medium-lora",
        ),
    ),
    _full_size("llama-3.1-8b-lora", "-batch-4", micro_batch_size=4),
    _full_size("llama-3.1-8b-lora", "-batch-16", micro_batch_size=16),
    _full_size("llama-3.1-8b-lora", "-seq-512", seq_len=512),
    _full_size("llama-3.1-8b-lora", "-seq-8192", seq_len=8192),
    _full_size("llama-3.1-8b-qlora", "-batch-4", micro_batch_size=4),
    _full_size("llama-3.1-8b-qlora", "-batch-16", micro_batch_size=16),
    _full_size("llama-3.1-8b-qlora", "-seq-512", seq_len=512),
    _full_size("llama-3.1-8b-qlora", "-seq-8192", seq_len=8192),
    _full_size("llama-3.1-8b-full-bf16", "-batch-2", micro_batch_size=2),
    _full_size("llama-3.1-8b-full-bf16", "-batch-8", micro_batch_size=8),
    _full_size("llama-3.1-8b-full-bf16", "-seq-512", seq_len=512),
    _full_size("llama-3.1-8b-full-bf16", "-seq-8192", seq_len=8192),
    _full_size("mixtral-qlora"),
    _full_size("llama-3.1-70b-qlora", warmup_steps=1, steps=2),
    *map(
        _full_size,
        (
            "llama-3.1-8b-full-bf16-in-backward",
            "llama-3.1-8b-int8-lora",
            "llama-3.1-8b-lora-offload-activations",
            "llama-3.2-1b-bf16",
            "llama-3.2-1b-fp32",
            "llama-3.2-1b-bf16-mixed",
            "llama-3.2-1b-fp16-mixed",
            "llama-3.2-1b-fused-linear",
            "llama-3.2-1b-ia3",
            "llama-3.2-1b-packing",
            "llama-2-7b-full-fp16-master",
        ),
    ),
    _full_size("llama-3.2-1b-packing", "-flash-attention", attention="flash_attention_2", micro_batch_size=1),
    _full_size("codellama-34b-qlora", warmup_steps=1, steps=2),
    # AdamW over billions of weights on the host's processor: the slowest steps of all
    _full_size("llama-3.2-3b-offload-optimizer", warmup_steps=1, steps=1),
    _full_size("llama-3.2-3b-offload-parameters", warmup_steps=1, steps=1),
)
"""Full size. The largest and slowest come late: what is not run is said so."""


PROFILED = (
    _full_size("llama-3.1-8b-lora"),
    _full_size("llama-3.1-8b-qlora"),
    _full_size("llama-3.2-1b-bf16"),
    _full_size("llama-3.2-1b-fp32"),
    _full_size("llama-3.2-1b-fp16-mixed"),
    _full_size("gemma-2-2b-lora"),
    _full_size("gpt2-medium-lora"),
    # Their backward takes 8 and 12 % longer than estimated, which that of LoRA does not.
    _full_size("llama-3.1-8b-full-bf16"),
    _full_size("llama-3.1-8b-full-bf16", "-batch-2", micro_batch_size=2),
)
"""Full size, of every kind of kernel: products in 16 and 32 bits and of 4-bit weights, three attentions."""


HOST_BOUND = tuple(
    _full_size(name, steps=10)
    for name in ("gemma-2-2b-lora", "llama-3.2-1b-bf16", "llama-3.2-1b-fused-linear", "llama-3.1-8b-qlora")
)
"""Full size: their steps wait for the host, whose speed differs from process to process."""


def _case(name: str, **fields: Any) -> Spec:
    return Spec(name, "llama-3.1-8b-lora", SHORT | {"warmup_steps": 1, "seq_len": 1024} | fields)


CASES = (
    _case("base"),
    *(_case(f"batch-{size}", micro_batch_size=size) for size in (2, 4, 8, 16, 32, 64)),
    *(_case(f"seq-{length}", seq_len=length) for length in (512, 2048, 4096, 8192, 16384)),
    _case("nf4", quantization="nf4", double_quant=True),
    _case("int8", quantization="int8"),
    _case("no-checkpointing", gradient_checkpointing=False),
    _case("eager", attention="eager"),
    _case("flash-attention-2", attention="flash_attention_2"),
    _case("fused-linear", loss="fused_linear"),
    _case("adamw-fused", optimizer_impl="fused"),
    _case("adamw-8bit", optimizer="adamw_8bit"),
    _case("sgd", optimizer="sgd"),
    _case("rank-64", lora_rank=64),
    _case("offload-activations", gradient_checkpointing=False, offload=["activations"]),
    _case("offload-parameters", offload=["parameters"]),
    _case("compile", compile=True),
)
"""A LoRA base, and each of the others differs from it in one field (offloaded activations in two: the
recomputation they replace is off)."""
