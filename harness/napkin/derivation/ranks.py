"""The derivation's part about several ranks: what one of them gathers, reduces and copies."""

from __future__ import annotations

from harness.napkin.derivation.model_states import Term
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.sizes import Sizes
from harness.napkin.ranks.units import Unit

FSDP = "torch/distributed/fsdp/_fully_shard"
SECTION = "Whole for a while on every rank"


def rank_terms(sizes: Sizes) -> list[Term]:
    """One term for each unit and buffer; none on one GPU."""
    return _of_layers(sizes) + _of_engine(sizes)


def _of_layers(sizes: Sizes) -> list[Term]:
    """What tensor parallelism adds to what is divided."""
    terms: list[Term] = []
    for weight in (w for w in sizes.trained if w.larger_gradient):
        beyond = weight.larger_gradient - weight.elements
        formula = f"{beyond:,} × {SIZES[weight.dtype]} B more than its part, until the step"
        source = "torch/distributed/tensor/_ops/_embedding_ops.py, of all words"
        terms.append(Term("Gradients", weight.name, formula, beyond * SIZES[weight.dtype], source))
    if sizes.lost_bytes:
        formula = "sums that recomputing starts and nobody waits for, of every step before the last"
        source = "torch/csrc/distributed/c10d/Functional.cpp; torchtitan issue 2763"
        terms.append(Term(SECTION, "lost by earlier steps", formula, sizes.lost_bytes, source))
    return terms


def _of_engine(sizes: Sizes) -> list[Term]:
    if sizes.buckets:
        formula = f"{len(sizes.buckets)} buckets, each closed at 25 MiB (the first at 1 MiB)"
        source = "torch/csrc/distributed/c10d/reducer.cpp, gradient_as_bucket_view=False"
        return [Term("Gradients", "DDP's copy", formula, sizes.bucket_bytes, source)]
    units = sizes.units
    if units is None:
        return []
    ranks = sizes.recipe.dp_shard
    terms: list[Term] = []
    named = {
        "the model's own unit": units.own,
        "the embeddings": units.embeddings,
        "the last norm and the head": units.tail,
        "a block": units.block,
    }
    for name, unit in named.items():
        if unit.weights:
            kept = unit in (units.own, units.tail) or units.kept
            formula = f"gathered from {ranks} ranks" + (", kept until its backward" if kept else "")
            terms.append(Term(SECTION, name, formula, unit.weights, f"{FSDP}, a unit a fully_shard"))
    if buffer := units.flat(units.block):
        source = f"{FSDP}, foreach_all_gather"
        terms.append(Term(SECTION, "a block's buffer", "the next one's gather", buffer, source))
    return terms + _gradients(units.block, "a block") + _gradients(units.last, "the last unit")


def _gradients(unit: Unit, name: str) -> list[Term]:
    if not unit.gradients:
        return []
    dtype = f"{unit.reduced / unit.gradients:.3g} × its gradients, whole"
    terms = [
        Term(SECTION, f"gradients of {name}", "as backward makes them", unit.gradients, "param.grad, whole"),
        Term(SECTION, f"what is reduced of {name}", dtype, unit.reduced, f"{FSDP}, foreach_reduce"),
    ]
    if unit.accumulated:
        formula = "of every unit, until the step's last micro batch"
        source = "FSDPParam.to_accumulated_grad_if_needed"
        terms.append(Term(SECTION, f"unsynced gradients of {name}", formula, unit.accumulated, source))
    return terms
