"""docs/contributing-toggles.md: which files of harness/ a toggle touches, read from the source.

    python -m pages.toggle_reads            # writes the page
    python -m pages.toggle_reads --check    # exits with 1 if the page is not up to date

A read of a field is an attribute of that name of anything that is called a recipe. What follows from fields
is a property of Recipe (recipe/derived.py), and stands in a table of its own with whoever asks for it.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from harness.recipe import EFFECTS, Recipe
from harness.report.table import markdown_table
from pages.parts import write_or_check
from pages.source import FILES, nodes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "contributing-toggles.md"
SIZES = (
    "model",
    "micro_batch_size",
    "gradient_accumulation_steps",
    "seq_len",
    "lora_rank",
    "lora_dropout",
    "weight_decay",
    "dp_replicate",
    "dp_shard",
    "tp",
)
"""Fields that are numbers or names and no switch: every part of the arithmetic needs them."""
TOGGLES = tuple(field for field in Recipe.model_fields if field not in EFFECTS and field not in SIZES)
DERIVED = "recipe/derived.py"
RULES = "recipe/rules.py"
MOST_FILES = 4

OWN = {
    **dict.fromkeys(
        ("adapter", "lora_targets", "adapter_dtype", "use_dora", "peft"), "training/toggles/adapter.py"
    ),
    **dict.fromkeys(("quantization", "double_quant", "upcast_for_kbit"), "training/toggles/quantization.py"),
    **dict.fromkeys(
        ("optimizer", "optimizer_impl", "lora_plus_ratio", "optimizer_in_backward", "master_weights"),
        "training/toggles/optimizer.py",
    ),
    "optimizer_rank": "training/toggles/low_rank_optimizer.py",
    "packing": "training/batches.py",
    **dict.fromkeys(("task", "dpo_reference", "grpo_beta"), "training/toggles/preference.py"),
    "num_labels": "training/toggles/scores.py",
    **dict.fromkeys(("images", "image_size"), "training/images.py"),
    "train_vision": "training/toggles/vision.py",
    **dict.fromkeys(("precision", "fp8"), "training/toggles/precision.py"),
    "gradient_checkpointing": "training/toggles/gradient_checkpointing.py",
    "selective_checkpointing": "training/toggles/gradient_checkpointing.py",
    "attention": "training/toggles/attention.py",
    **dict.fromkeys(("loss", "kernels", "mlp_tiles"), "training/toggles/liger.py"),  # and chunked_loss.py
    "offload": "training/toggles/offload_parameters.py",  # and offload_activations.py, stepped_copy.py
    **dict.fromkeys(("compile", "activation_memory_budget"), "training/toggles/compile.py"),
    "max_grad_norm": "training/model.py",
    **dict.fromkeys(("parallel", "sync_each_micro_batch"), "parallel/engines.py"),
    **dict.fromkeys(("reshard_after_forward", "reduce_dtype", "wrap", "cpu_offload"), "parallel/units.py"),
}
"""Where a toggle is built: what decides what its value means for the model, the optimizer or the data."""

EXCEPTIONS = {
    ("parallel", "recipe/mesh.py"): "which size of the mesh follows from the number of processes",
    ("packing", "data/check.py"): "with packing a paragraph of a .txt file is a document",
    ("packing", "data/rows.py"): "puts the documents into rows",
    ("quantization", "fit/host_memory.py"): "names the value in what it refuses",
    ("quantization", "recipe/surprises.py"): "names the value in what it warns of",
    ("images", "simulate/cuda/behaviour.py"): "integers of such a batch have values in a simulation",
    ("images", "training/model_config.py"): "which of two classes a type's model is",
    ("upcast_for_kbit", "simulate/cuda/libraries.py"): "peft empties CUDA's cache after it",
    ("upcast_for_kbit", "training/toggles/attention.py"): "eager's mask has the dtype of the embeddings",
    ("attention", "simulate/cuda/behaviour.py"): "stands in for the package's kernels",
    ("attention", "training/model.py"): "hands the value to transformers, which builds it",
    ("task", "data/pairs.py"): "names the value in what it refuses",
    ("task", "training/after_step.py"): "names the value in what it refuses",
    ("optimizer", "training/toggles/low_rank_optimizer.py"): "builds those that project gradients",
    ("optimizer", "measure/measured_run.py"): "warns that nothing is paged on a CPU",
    ("optimizer_in_backward", "fit/sharding.py"): "refuses what it has no model of",
    ("offload", "fit/changes.py"): "advice: adds a value to those that are there",
    ("offload", "fit/host_memory.py"): "names the values in what it refuses",
    ("offload", "fit/sharding.py"): "refuses what it has no model of",
    ("compile", "measure/measured_run.py"): "no tracker of tensors sees into compiled code",
    ("compile", "simulate/simulated_run.py"): "refuses it: the compiler chooses kernels and buffers",
}
"""Files beside a toggle's own and its one place in napkin that read its field, and why they must."""

INTRODUCTION = f"""\
# What a toggle touches

Written by `python -m pages.toggle_reads` from the source; a test holds it. A toggle is four edits: its field
with its rules and effects in `harness/recipe/`, the file that builds it, its price in one place of
`harness/napkin/`, and its tests. No more than {MOST_FILES} files read a field, its own rules not counted, and
each beyond those two is argued here. `harness/training/model.py` calls the function of every toggle,
and the toggle's file decides.

"""

PROPERTIES = """
What follows from a field is a property of the recipe: whoever asks for one need not know the field's values.
"""


def is_recipe(node: ast.expr, file: str) -> bool:
    """Whether the expression is called a recipe: `recipe`, `self._recipe`, `run.recipe`; `r` in a rule."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in ("recipe", "asked", "loaded", "base") or (file == RULES and name == "r")


@cache
def _reads() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for file in files():
        attributes = [node for node in nodes(file) if isinstance(node, ast.Attribute)]
        for name in {node.attr for node in attributes if is_recipe(node.value, file)}:
            found[name].append(file)
    return dict(found)


def files() -> list[str]:
    """Every file of harness/ but the fields' own and their rules, by its path there."""
    return [file for file in FILES if file not in (DERIVED, RULES)]


def readers(name: str) -> list[str]:
    """The files that read `name`, a field or a property, off a recipe."""
    return _reads().get(name, [])


@cache
def follows_from() -> dict[str, set[str]]:
    """By property of Recipe: the fields that it is computed from, through other properties too."""
    of_self = {
        function.name: {
            node.attr
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        for function in nodes(DERIVED)
        if isinstance(function, ast.FunctionDef) and isinstance(getattr(Recipe, function.name, 0), property)
    }

    def fields(name: str) -> Iterator[str]:
        for other in of_self.get(name, ()):
            yield from fields(other) if other in of_self else (other,)

    return {name: set(fields(name)) for name in of_self}


def page() -> str:
    """The Markdown of the whole page."""
    fields_read, asked = [], []
    for toggle in TOGGLES:
        found = [f"`{file}`{_remark(toggle, file)}" for file in readers(toggle)]
        fields_read.append((f"`{toggle}`", f"{len(found)}: {', '.join(found)}"))
    for name, fields in follows_from().items():
        if not fields.isdisjoint(TOGGLES):
            of = ", ".join(f"`{field}`" for field in sorted(fields))
            asked.append((f"`{name}`", of, ", ".join(f"`{file}`" for file in readers(name))))
    toggles = markdown_table(("toggle", "files that read its field"), fields_read)
    return f"{INTRODUCTION}{toggles}{PROPERTIES}\n{markdown_table(('property', 'of', 'who asks'), asked)}"


def _remark(toggle: str, file: str) -> str:
    if file == OWN[toggle]:
        return " (builds it)"
    return (
        ", its price" if file.startswith("napkin/") else f" ({EXCEPTIONS.get((toggle, file), 'not argued')})"
    )


if __name__ == "__main__":
    write_or_check({PAGE: page()}, "pages.toggle_reads", check="--check" in sys.argv[1:])
