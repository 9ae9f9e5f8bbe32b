"""The derivation's first half: parameters, gradients and optimizer, each term with formula and source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.napkin.dtypes import SIZES
from harness.napkin.memory.sizes import Sizes
from harness.napkin.model.weights import Weight, buffer_bytes

BITSANDBYTES = "arXiv 2305.14314, section 3; bitsandbytes.functional.quantize_4bit"


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
    terms = [_weight_term(sizes, w) for w in sizes.outer]
    in_blocks = sizes.in_blocks
    base = [w for w in in_blocks if not _is_adapter(w)]
    mlp = [w for w in base if w.matrix and w.name.startswith("mlp")]
    terms += _group_terms(sizes, "attention projections", [w for w in base if w.matrix and w not in mlp])
    terms += _group_terms(sizes, "MLP projections", mlp)
    terms += _group_terms(sizes, "norms and biases", [w for w in base if not w.matrix])
    terms += _group_terms(sizes, "adapters", [w for w in in_blocks if _is_adapter(w)])
    buffers = buffer_bytes(sizes.built)
    if buffers:
        formula = f"2·{sizes.built.shape.rotary_dim // 2} × 4 B"
        terms.append(Term("Parameters", "buffers", formula, buffers, "rotary frequencies, arXiv 2104.09864"))
    return terms


def _is_adapter(weight: Weight) -> bool:
    return weight.name.rpartition(".")[2] in ("lora_A", "lora_B", "ia3")


def _weight_term(sizes: Sizes, weight: Weight) -> Term:
    return Term("Parameters", weight.name, weight.formula, weight.total_bytes, _weight_source(weight))


def _group_terms(sizes: Sizes, name: str, members: Sequence[Weight]) -> list[Term]:
    """One term for each dtype among `members`, all of which every layer has."""
    terms = []
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
    if weight.dtype in ("nf4", "fp4"):
        return BITSANDBYTES
    if weight.dtype == "int8":
        return "arXiv 2208.07339; bitsandbytes.functional.int8_vectorwise_quant"
    if _is_adapter(weight):
        return "arXiv 2106.09685 (LoRA: rank · (inputs + outputs)), 2205.05638 (IA3: one scale a feature)"
    return "the config's sizes"


def gradient_terms(sizes: Sizes) -> list[Term]:
    """One gradient a trained parameter, in its dtype."""
    count = sum(w.elements * w.count for w in sizes.trained)
    dtypes = " + ".join(
        f"{sum(w.elements * w.count for w in sizes.trained if w.dtype == dtype):,} × {SIZES[dtype]} B"
        for dtype in dict.fromkeys(w.dtype for w in sizes.trained)
    )
    note = "one by one: freed as each is stepped" if sizes.recipe.optimizer_in_backward else ".grad of every"
    return [
        Term(
            "Gradients",
            f"of {count:,} trained parameters",
            dtypes,
            sizes.gradient_bytes,
            f"{note} trained weight",
        )
    ]


def optimizer_terms(sizes: Sizes) -> list[Term]:
    """Moments, master copies, and what the step needs for a moment."""
    recipe, optimizer = sizes.recipe, sizes.optimizer
    count = sum(w.elements * w.count for w in sizes.trained)
    where = " (in host memory)" if optimizer.on_host else ""
    per_weight = f"{optimizer.state_bytes / count:.4g} B × {count:,}" if count else "0"
    source = "torch/optim" if optimizer.state_bytes else "no state"
    if recipe.optimizer.endswith("_8bit") or recipe.optimizer.startswith("paged"):
        source = "arXiv 2110.02861; bitsandbytes/optim/optimizer.py"
    terms = [Term("Optimizer", f"{recipe.optimizer} state{where}", per_weight, optimizer.state_bytes, source)]
    if optimizer.copy_bytes:
        formula = f"{count:,} × {optimizer.copy_bytes // count} B"
        terms.append(
            Term(
                "Optimizer",
                f"copy that is stepped{where}",
                formula,
                optimizer.copy_bytes,
                "arXiv 1710.03740, 3.1",
            )
        )
    if optimizer.paged_bytes:
        formula = f"{optimizer.paged_bytes / count:.4g} B × {count:,}"
        terms.append(
            Term(
                "Optimizer",
                "paged state (unified memory)",
                formula,
                optimizer.paged_bytes,
                "arXiv 2305.14314, 3",
            )
        )
    if optimizer.step_temporary_bytes and not optimizer.on_host:
        size = optimizer.step_temporary_bytes
        name = f"temporary of a {recipe.optimizer_impl} step"
        terms.append(
            Term("Optimizer", name, f"{size / count:.4g} B × {count:,}", size, "torch/optim/adam.py")
        )
    return terms
