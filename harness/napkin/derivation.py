"""The derivation of a step's memory: every term with its formula and its source. No torch."""

from collections.abc import Iterator

from harness.napkin.memory import Memory
from harness.napkin.terms import Term, sum_of
from harness.napkin.weights import SIZES, Weight


def derive_terms(memory: Memory) -> list[Term]:
    """Every term of the step's memory, in the order in which the derivation is printed."""
    return [*_parameters(memory), *_states(memory), *_kept(memory), *_others(memory)]


def _parameters(memory: Memory) -> Iterator[Term]:
    """Weights outside the blocks one by one, those in blocks by kind, and buffers."""
    section, layers, groups = "Parameters", memory.built.shape.layers, dict[str, list[Weight]]()
    for weight in memory.built.outer:
        yield Term(section, weight.name, weight.formula, weight.total_bytes, "the config's sizes")
    for weight in memory.built.in_blocks:
        kind = "MLP projections" if weight.name.startswith("mlp") else "attention projections"
        kind = "adapters" if weight.adapter else kind if weight.matrix else "norms and biases"
        groups.setdefault(f"{kind}, {weight.dtype}", []).append(weight)
    for name, weights in groups.items():
        each = [f"{'' if w.count == layers else f'{w.count}/{layers}·'}({w.formula})" for w in weights]
        inner = " + ".join(f"{n}·{f}" if (n := each.count(f)) > 1 else f for f in dict.fromkeys(each))
        source = "arXiv 2106.09685 (LoRA), 2205.05638 (IA3)" if weights[0].adapter else "the config's sizes"
        source = "arXiv 2305.14314, 2208.07339; bitsandbytes" if weights[0].quantized else source
        yield Term(section, name, f"{layers} layers × [{inner}]", sum(w.total_bytes for w in weights), source)
    if size := memory.reference_bytes:
        yield Term(section, "the frozen reference", "as many as the model", size, "arXiv 2305.18290")
    if size := memory.built.buffer_bytes:
        yield Term(section, "buffers", f"2·{size // 8} × 4 B", size, "rotary frequencies, arXiv 2104.09864")


def _states(memory: Memory) -> Iterator[Term]:
    """Gradients, the optimizer's state and copies, the temporaries of its step, and what FSDP2 gathers."""
    step, block, counts = memory.optimizer, memory.block, dict[str, int]()
    for weight in memory.trained:
        counts[weight.dtype] = counts.get(weight.dtype, 0) + weight.elements * weight.count
    count = sum(counts.values())
    formula = " + ".join(f"{n:,} × {SIZES[dtype]} B" for dtype, n in counts.items())
    where = " (in host memory)" if memory.recipe.steps_on_host else ""
    each, fsdp = "{:.4g} B × " + f"{count:,}", "torch/distributed/fsdp/_fully_shard"
    rows = [
        ("Gradients", f"of {count:,} trained parameters", formula, memory.gradient_bytes, ".grad of each"),
        ("Gradients", "DDP's copy", "buckets, as many bytes", memory.bucket_bytes, "c10d/reducer.cpp"),
        ("Optimizer", f"{step.name} state{where}", each, step.state_bytes - step.paged_bytes, "torch/optim"),
        ("Optimizer", f"copy that is stepped{where}", each, step.copy_bytes, "arXiv 1710.03740, 3.1"),
        ("Optimizer", "paged state (unified memory)", each, step.paged_bytes, "arXiv 2305.14314, 3"),
        ("Optimizer", f"temporary of a {step.implementation} step{where}", each, step.step_bytes, "adam.py"),
        ("Whole for a while", "outside the blocks, and 3 blocks", "gathered", memory.gathered(3), fsdp),
        ("Whole for a while", "a block's gradients", "made, and reduced", block.made + block.reduced, fsdp),
    ]
    for section, name, formula, size, source in rows:
        if size or name.endswith(f"state{where}"):
            yield Term(section, name, formula.format(size / max(1, count)), size, source)


def _kept(memory: Memory) -> Iterator[Term]:
    """What one block of each kind keeps for backward, tensor by tensor; then all blocks, and the loss."""
    acts, shape, budget = memory.activations, memory.built.shape, memory.budget
    for block in shape.blocks:
        title = "One block, computed again in backward" if acts.recomputes else "Kept by one block"
        title += f" ({block.count} of {block.mixer}, {block.feed})" if len(shape.blocks) > 1 else ""
        yield from _shown(title, acts.kept_by(block))
    formula = " + ".join(f"{count} × {kept:,} B" for count, kept, _ in memory.kept)
    if acts.recomputes:
        formula = f"{shape.layers} layers × [{acts.block_input.formula}]"
    share = "" if budget == 1 else f", {budget:g} of it by activation_memory_budget"
    where = "in host memory" if memory.recipe.blocks_on_host else "arXiv 1604.06174, or the lines above"
    yield Term("Kept for backward", f"all blocks{share}", formula, memory.kept_by_blocks, where)
    yield from _shown(f"Kept for backward by the loss{share}", acts.loss.kept)
    yield from (term._replace(section="Loss, when forward ends") for term in acts.loss.at_end)
    yield from (term._replace(section="Loss, when backward begins") for term in acts.loss.in_backward)


def _shown(section: str, terms: list[Term]) -> Iterator[Term]:
    """The terms in a section: equal ones as one line, and all that are under 1/500 of the sum as another."""
    whole, groups = sum_of(terms), dict[Term, int]()
    for term in terms:
        if term.size_bytes * 500 >= whole:
            groups[term] = groups.get(term, 0) + 1
    for term, n in groups.items():
        times = f"{n} × [{term.formula}]" if n > 1 else term.formula
        yield Term(section, term.name, times, n * term.size_bytes, f"kept by {term.source}")
    if rest := whole - sum(n * term.size_bytes for term, n in groups.items()):
        yield Term(section, "small tensors", "each under 1/500 of the sum", rest, "statistics, ranks")


def _others(memory: Memory) -> Iterator[Term]:
    """Inputs and workspaces; and the CUDA context and host memory, which are not the allocator's."""
    hardware, tokens = memory.hardware, memory.recipe.tokens_per_step
    workspaces, context = hardware.cublas_workspace_bytes, hardware.calibration.cuda_context_bytes
    rows = [
        ("inputs", f"{tokens:,} tokens of ids and labels, 8 B each", memory.input_bytes, "int64"),
        ("cuBLAS workspaces", "2 threads × 1 workspace", workspaces, "ATen/cuda/CublasHandlePool.cpp"),
        ("autocast's weight copies", "16 bit, of trained weights", memory.weight_copies, "autocast_mode.cpp"),
        ("CUDA context (not in the sums)", "driver and kernels", context, "harness/hardware/hardware.py"),
        ("host memory", "what is offloaded", sum(memory.host_parts.values()), "recipe: offload"),
    ]
    yield from (Term("Other", *row) for row in rows if row[2])
