"""The derivation's first half: parameters, gradients and optimizer, each term with formula and source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.napkin.dtypes import SIZES
from harness.napkin.memory.sizes import Sizes
from harness.napkin.model.weights import Weight, buffer_bytes

QUANTIZED = {
    **dict.fromkeys(("nf4", "fp4"), "arXiv 2305.14314, section 3; bitsandbytes.functional.quantize_4bit"),
    "int8": "arXiv 2208.07339; bitsandbytes.functional.int8_vectorwise_quant",
}


@dataclass(frozen=True)
class Term:
    """One line of the derivation: `size_bytes` is what `formula` comes to."""

    section: str
    name: str
    formula: str
    size_bytes: int
    source: str


def parameter_terms(sizes: Sizes) -> list[Term]:
    """Weights: rows · columns × bytes of the dtype, times the layers that have one."""
    terms = [Term("Parameters", w.name, w.formula, w.total_bytes, _weight_source(w)) for w in sizes.outer]
    in_blocks = sizes.in_blocks
    base = [w for w in in_blocks if not w.adapter]
    mlp = [w for w in base if w.matrix and w.name.startswith("mlp")]
    terms += _group_terms(sizes, "attention projections", [w for w in base if w.matrix and w not in mlp])
    terms += _group_terms(sizes, "MLP projections", mlp)
    terms += _group_terms(sizes, "norms and biases", [w for w in base if not w.matrix])
    terms += _group_terms(sizes, "adapters", [w for w in in_blocks if w.adapter])
    buffers = buffer_bytes(sizes.built)
    if buffers:
        formula = f"2·{sizes.built.shape.rotary_dim // 2} × 4 B"
        terms.append(Term("Parameters", "buffers", formula, buffers, "rotary frequencies, arXiv 2104.09864"))
    return terms


def _group_terms(sizes: Sizes, name: str, members: Sequence[Weight]) -> list[Term]:
    """One term for each dtype among `members`, all of which every layer has."""
    terms: list[Term] = []
    for dtype in dict.fromkeys(w.dtype for w in members):
        same = [w for w in members if w.dtype == dtype]
        counts: dict[str, int] = {}
        for weight in same:
            counts[weight.formula] = counts.get(weight.formula, 0) + 1
        parts = [f"{n}·({formula})" if n > 1 else f"({formula})" for formula, n in counts.items()]
        formula = f"{sizes.built.shape.layers} layers × [{' + '.join(parts)}]"
        size = sum(w.total_bytes for w in same)
        terms.append(Term("Parameters", f"{name}, {dtype}", formula, size, _weight_source(same[0])))
    return terms


def _weight_source(weight: Weight) -> str:
    if weight.dtype in QUANTIZED:
        return QUANTIZED[weight.dtype]
    if weight.adapter:
        return "arXiv 2106.09685 (LoRA: rank · (inputs + outputs)), 2205.05638 (IA3: one scale a feature)"
    return "the config's sizes"


def gradient_terms(sizes: Sizes) -> list[Term]:
    """One gradient a trained parameter, in its dtype."""
    count = sum(w.elements * w.count for w in sizes.trained)
    dtypes = " + ".join(
        f"{sum(w.elements * w.count for w in sizes.trained if w.dtype == dtype):,} × {SIZES[dtype]} B"
        for dtype in dict.fromkeys(w.dtype for w in sizes.trained)
    )
    note = "one by one: freed as each is stepped" if sizes.optimizer.in_backward else ".grad of every"
    return [
        Term(
            "Gradients",
            f"of {count:,} trained parameters",
            dtypes,
            sum(w.elements * w.count * SIZES[w.dtype] for w in sizes.trained),
            f"{note} trained weight",
        )
    ]


def optimizer_terms(sizes: Sizes) -> list[Term]:
    """Moments, master copies, and what the step needs for a moment."""
    optimizer = sizes.optimizer
    count = sum(w.elements * w.count for w in sizes.trained)
    where = " (in host memory)" if optimizer.on_host else ""
    temporary = 0 if optimizer.on_host else optimizer.step_temporary_bytes
    rows = [
        (f"{optimizer.title} state{where}", optimizer.state_bytes, optimizer.source),
        (f"copy that is stepped{where}", optimizer.copy_bytes, "arXiv 1710.03740, 3.1"),
        ("paged state (unified memory)", optimizer.paged_bytes, "arXiv 2305.14314, 3"),
        (f"temporary of a {optimizer.implementation} step", temporary, "torch/optim/adam.py"),
    ]
    return [
        Term("Optimizer", name, f"{size / count:.4g} B × {count:,}" if count else "0", size, source)
        for i, (name, size, source) in enumerate(rows)
        if size or i == 0
    ]
