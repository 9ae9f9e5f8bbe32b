"""Napkin's answer for layers that ranks share, against transformers' plans and against the simulation, whose
layers PyTorch's own tensor parallelism divides.

`python tests/napkin/test_tensor_parallel.py FIRST LAST` prints random cases and how far off they are; the
suite runs some, and all cells of a grid.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import transformers

from harness.architecture.families import FAMILIES
from harness.errors import InputError
from harness.hardware.hardware import find_hardware
from harness.napkin.derivation.activations import derive_terms
from harness.napkin.model.built_model import BuiltModel
from harness.napkin.model.divided import DIVIDED, EMBEDDINGS_WHOLE
from harness.napkin.prediction import estimate, predict
from harness.napkin.ranks.traffic import traffic
from harness.parallel.layers import STYLES
from harness.recipe.recipe import Recipe
from tests.napkin.test_random import TOGGLES, peaks, shallow
from tests.support.napkin_oracle import keeps_workspaces

H100 = find_hardware("h100")
LARGEST, MEDIAN = 0.08, 0.02
SEED, CASES = 17, 16
NAMES = ("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "mistral-7b", "gemma-2-2b")
NAMES += ("pythia-1.4b", "qwen2.5-0.5b", "qwen2.5-7b", "tinyllama-1.1b")
OFF = ("quantization", "double_quant", "upcast_for_kbit", "offload", "optimizer_in_backward", "loss")
"""Toggles that tensor parallelism excludes."""
OF_RANKS: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True, False),
    "sync_each_micro_batch": (True, False),
    "reduce_dtype": (None, "fp32"),
    "wrap": ("block", "transformers", "accelerate"),
}
"""Of the ranks that gather weights beside."""


def llama(**fields: Any) -> Recipe:
    given = {"model": "llama-3.1-8b", "precision": "bf16", "micro_batch_size": 2, "seq_len": 512}
    return Recipe(**{**given, "parallel": "tp", "tp": 8, **fields})


# the plan ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def planned(request: Any) -> tuple[str, Any]:
    """A family, and a model of one layer as transformers builds it."""
    config = transformers.AutoConfig.for_model(request.param)
    config.num_hidden_layers = 1
    with torch.device("meta"):
        return request.param, transformers.AutoModelForCausalLM.from_config(config)


def test_the_families_that_divide_are_those_of_transformers_plans(planned):
    family, model = planned
    plan = dict(model.tp_plan or {})
    assert (family in DIVIDED) == (bool(plan) and set(plan.values()) <= set(STYLES))


def test_every_layer_is_divided_as_transformers_plans_it(planned):
    family, model = planned
    if family not in DIVIDED:
        pytest.skip("no plan")
    built = BuiltModel(llama(tp=2), _shape_of(model.config))
    # before 5.21 the plan names them with a tied head alone; harness/parallel/layers.py divides them always
    embeddings = {"embed_tokens": "embedding_rowwise"} if hasattr(model.base_model, "embed_tokens") else {}
    plan = embeddings | {
        re.sub(r"^(model|gpt_neox)\.(layers\.\*\.)?", "", name): style
        for name, style in model.tp_plan.items()
    }
    ours: dict[str, str] = {m.name: str(built.divided(m)) for m in [*built.block_matrices(), built.head]}
    if family not in EMBEDDINGS_WHOLE:
        ours["embed_tokens"] = "embedding_rowwise"
    assert ours == plan


def _shape_of(config: Any) -> Any:
    from harness.architecture.model_shape import read_shape

    return read_shape(config.to_dict())


# the derivation ---------------------------------------------------------------------------------------


def test_a_rank_by_hand():
    """Llama-3.1-8B on 8 ranks, bf16: 32 blocks of 4 query heads and 1 key-value head of 128, an MLP of 1,792,
    norms whole, an eighth of 128,256 words; the embeddings' gradient is of all words."""
    memory = estimate(llama(), H100)
    sizes = memory.sizes
    heads, rest = 4096 * (4 + 2 * 1 + 4) * 128, 3 * 4096 * 1792 + 2 * 4096
    weights = 32 * (heads + rest) + 2 * 16_032 * 4096 + 4096
    buffers = 2 * 64 * 4
    assert sizes.parameter_bytes == 2 * weights + buffers
    assert sizes.gradient_bytes == 2 * (weights + (128_256 - 16_032) * 4096)
    assert sizes.device_state == 2 * 2 * weights
    named = {term.name: term.size_bytes for term in derive_terms(memory)}
    assert named["embed_tokens"] == 2 * (128_256 - 16_032) * 4096  # the last of that name: the gradient's


def test_what_a_block_sums_over_its_ranks():
    """In forward attention's and the MLP's outputs; in backward the inputs' gradients of five projections.
    Each is sent 2 x 7/8 times. Beside them the embeddings, the gathered logits, and the head's input."""
    stream, ring = 2 * 512 * 4096 * 2, 7 / 8
    logits = 2 * 512 * 128_256 * 2
    found = {
        phase: sum(sent.sent for sent in all_sent)
        for phase, all_sent in traffic(estimate(llama(), H100).sizes).items()
    }
    assert found["forward"] == pytest.approx(2 * ring * stream * (32 * 2 + 1) + ring * logits)
    assert found["backward"] == pytest.approx(2 * ring * stream * (32 * 5 + 1))


# the cells --------------------------------------------------------------------------------------------


GRID = [
    {"model": model, "tp": tp, "gradient_checkpointing": checkpointing, "adapter": adapter}
    for model, tp, checkpointing, adapter in product(
        ("llama-3.2-1b", "llama-3.1-8b"), (2, 4, 8), (False, True), ("none", "lora")
    )
]


@pytest.fixture(scope="module")
def off(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """How far napkin is from the simulation, by cell."""
    found: dict[str, float] = {}
    for fields in GRID:
        recipe = shallow(llama(**fields), tmp_path_factory.mktemp("model"))
        predicted, simulated = peaks(recipe, "h100")
        found[str(fields)] = predicted / simulated - 1
    return found


@keeps_workspaces
def test_the_cells_of_a_grid_peak_where_the_simulation_does(off):
    assert len(off) == 24
    assert max(map(abs, off.values())) < LARGEST, max(off.items(), key=lambda cell: abs(cell[1]))
    assert median(map(abs, off.values())) < MEDIAN


def drawn(index: int) -> Recipe:
    """The recipe of a case, each toggle off as often as on. What cannot be is drawn anew."""
    draw = random.Random(SEED + index)
    while True:
        parallel = draw.choice(("tp", "fsdp+tp"))
        toggles = {name: values for name, values in TOGGLES.items() if name not in OFF}
        toggles |= {"optimizer": ("adamw", "sgd")} | (OF_RANKS if parallel == "fsdp+tp" else {})
        fields = {
            name: values[0] if draw.random() < 0.5 else draw.choice(values[1:])
            for name, values in toggles.items()
        }
        fields |= {
            "parallel": parallel,
            "tp": draw.choice((2, 4, 8)),
            "dp_shard": draw.choice((2, 8)) if parallel == "fsdp+tp" else 1,
            "model": draw.choice(NAMES),
            "micro_batch_size": draw.choice((1, 2, 3)),
            "seq_len": draw.choice((256, 512, 1000)),
            "lora_rank": draw.choice((8, 16, 64)),
        }
        try:
            recipe = Recipe(**fields)
            predict(recipe, find_hardware("h200"))
            return recipe
        except (InputError, ValueError):  # a pair, or heads that do not divide
            continue


@keeps_workspaces
@pytest.mark.parametrize("index", range(CASES))
def test_a_random_recipe_peaks_where_the_simulation_does(tmp_path, index):
    recipe = drawn(index)
    predicted, simulated = peaks(shallow(recipe, tmp_path), "h200")
    assert predicted == pytest.approx(simulated, rel=LARGEST), recipe.model_dump(exclude_defaults=True)


def main(first: int, last: int) -> None:
    """Print the cases from `first` to `last` and how far off they are."""
    found: list[float] = []
    for index in range(first, last):
        recipe = drawn(index)
        fields = recipe.model_dump(mode="json", exclude_defaults=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                predicted, simulated = peaks(shallow(recipe, Path(folder)), "h200")
        except (InputError, AssertionError, RuntimeError) as error:
            print(index, fields, repr(error)[:200], flush=True)
            continue
        found.append(abs(predicted / simulated - 1))
        print(f"{index} {predicted / simulated - 1:+.2%} {fields}", flush=True)
    print(f"{len(found)} cases: median {median(found):.2%}, max {max(found):.2%}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
