"""The whole derivation, and its second half: what is kept for backward, the loss, and all the rest."""

from __future__ import annotations

from harness.napkin.derivation.model_states import Term, gradient_terms, optimizer_terms, parameter_terms
from harness.napkin.derivation.ranks import rank_terms
from harness.napkin.dtypes import SIZES
from harness.napkin.memory.moments import Memory
from harness.napkin.memory.sizes import Sizes
from harness.napkin.tape.stages import Stage
from harness.napkin.tape.tape import Tape, Tensor

HUGGING_FACE_LOSS = "transformers/loss/loss_utils.py, ForCausalLMLoss"


def derive_terms(memory: Memory) -> list[Term]:
    """Every term, in the order of the derivation."""
    sizes = memory.sizes
    return [
        *parameter_terms(sizes),
        *gradient_terms(sizes),
        *optimizer_terms(sizes),
        *rank_terms(sizes),
        *block_terms(sizes),
        *loss_terms(memory),
        *other_terms(sizes),
    ]


def block_terms(sizes: Sizes) -> list[Term]:
    """What one block keeps for backward, tensor by tensor, then all blocks."""
    stage = sizes.stages.blocks[-1]
    layers = sizes.built.shape.layers
    if one := stage.input_kept:
        formula, size = f"{layers} layers × [{_formula(stage.tape, one)}]", layers * one.size_bytes
        terms = [Term("Kept for backward", "block inputs (checkpointing)", formula, size, "arXiv 1604.06174")]
        if stage.kept_by_ctx:
            what, formula = "inputs of int8 products", f"{layers} layers × {stage.kept_by_ctx:,} B"
            source = "MatMul8bitLt's ctx.tensors, which checkpointing does not reach"
            terms.append(Term("Kept for backward", what, formula, layers * stage.kept_by_ctx, source))
        section = "One block, computed again in backward"
        return terms + _kept_terms(section, stage)
    section = "Kept for backward by one block"
    terms = _kept_terms(section, stage)
    total = sum(s.kept_until_backward * s.count for s in sizes.stages.blocks)
    first = sizes.stages.blocks[0]
    formula = f"{layers} layers × {stage.kept:,} B"
    if first.kept != stage.kept:
        formula = f"{layers - 1} × {stage.kept:,} B + {first.kept:,} B (the first, whose input is frozen)"
    where = "in host memory" if sizes.recipe.activations_on_host else "sum of the lines above"
    return [*terms, Term("Kept for backward", "all blocks", formula, total, where)]


def _kept_terms(section: str, stage: Stage) -> list[Term]:
    """One term for each distinct tensor; what layers keep alike is one term, the tiny ones another.

    Which operator keeps what is PyTorch's tools/autograd/derivatives.yaml.
    """
    total = sum(t.size_bytes for t in stage.kept_tensors)
    groups: dict[tuple[str, str], list[Tensor]] = {}
    tiny = 0
    for t in stage.kept_tensors:
        if t.size_bytes * 500 < total:
            tiny += t.size_bytes
        else:
            groups.setdefault((t.name, _formula(stage.tape, t)), []).append(t)
    terms: list[Term] = []
    for (name, formula), alike in groups.items():
        times = f"{len(alike)} × [{formula}]" if len(alike) > 1 else formula
        keepers = [op.name for op in stage.tape.ops if any(kept.storage is alike[0] for kept in op.saved)]
        source = f"kept for the backward of {', '.join(keepers[:3])}" + (", ..." if keepers[3:] else "")
        terms.append(Term(section, name, times, sum(t.size_bytes for t in alike), source))
    if tiny:
        terms.append(
            Term(section, "small tensors", "each under 1/500 of the sum", tiny, "statistics, labels")
        )
    return terms


def _formula(tape: Tape, t: Tensor) -> str:
    """`B·S·H × 2 B = 4·2,048·4,096 × 2 B`; a weight's copy has its size only."""
    size = SIZES[t.dtype]
    symbols = t.dims.split()
    if (
        not symbols
        or any(s not in tape.sizes for s in symbols)
        or tape.elements(t.dims) * size != t.size_bytes
    ):
        return f"{t.size_bytes // size:,} × {size} B"
    numbers = "·".join(f"{tape.sizes[s]:,}" for s in symbols)
    return f"{'·'.join(symbols)} × {size} B = {numbers} × {size} B"


def loss_terms(memory: Memory) -> list[Term]:
    """Logits and loss: for the stock loss 2V + 4V bytes a token held in forward and 4V kept; in backward the
    log-probabilities and two gradients of 4V each."""
    stages = memory.sizes.stages
    tape = stages.loss.tape
    terms = _kept_terms("Kept for backward by the loss", stages.loss)
    if fused := stages.head.fused:
        source = "arXiv 2410.10989; liger_kernel/ops/fused_linear_cross_entropy.py"
        made = "gradients made in forward"
        return [
            *terms,
            Term("Loss", made, "hidden states + head", fused.gradient_bytes, source),
            Term("Loss", "one chunk of logits", "chunk·V", fused.temporary_bytes, source),
        ]
    *_, held = (m for m in memory.moments if m.phase == "forward")
    logits = f"logits and their fp32 copy beside the hidden states, {tape.elements('B S'):,} tokens"
    backward = next(m for m in memory.moments if m.phase == "loss")
    return [
        *terms,
        Term("Loss", "held at the end of forward", logits, held.temporaries, HUGGING_FACE_LOSS),
        Term(
            "Loss",
            "gradients in its backward",
            backward.where,
            backward.temporaries,
            "engine.cpp, in reverse",
        ),
    ]


def other_terms(sizes: Sizes) -> list[Term]:
    """Inputs, tables, masks, workspaces; and beyond the allocator, the CUDA context."""
    hardware, micro = sizes.hardware, sizes.micro_batches
    tokens = sizes.stages.loss.tape.elements("T")
    terms = [
        Term(
            "Other",
            "inputs",
            f"{micro} micro batches × {tokens:,} tokens × 2 × 8 B",
            sizes.input_bytes,
            "int64",
        ),
        Term(
            "Other",
            "cuBLAS workspaces",
            "2 threads × 1 workspace",
            hardware.cublas_workspace_bytes,
            "aten/src/ATen/cuda/CublasHandlePool.cpp",
        ),
    ]
    if sizes.table_bytes:
        formula = " + ".join(_formula(sizes.stages.loss.tape, t) for t in sizes.stages.tables)
        terms.append(
            Term("Other", "rotary tables", formula, sizes.table_bytes, "modeling_*.py, shared by blocks")
        )
    if sizes.mask_bytes:
        formula = " + ".join(_formula(sizes.stages.loss.tape, t) for t in sizes.stages.masks)
        terms.append(
            Term("Other", "attention masks", formula, sizes.mask_bytes, "transformers/masking_utils.py")
        )
    if casts := sizes.cached_casts(sizes.stages.all):
        terms.append(
            Term(
                "Other",
                "autocast's weight copies",
                "until forward ends",
                casts,
                "autocast_mode.cpp",
            )
        )
    context = hardware.calibration.cuda_context_bytes
    terms.append(
        Term(
            "Other",
            "CUDA context (not in the sums)",
            "driver and kernels",
            context,
            "harness/hardware/hardware.py",
        )
    )
    if sizes.host_bytes:
        terms.append(
            Term("Other", "host memory", "what is offloaded or paged", sizes.host_bytes, "recipe: offload")
        )
    return terms
