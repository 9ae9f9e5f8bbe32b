"""A size is spelled in the dimensions of the tensor that it is of, whose shape the model itself has."""

import re
from fractions import Fraction
from math import prod
from pathlib import Path

import pytest
import torch

from harness.fit.derived import DerivedFormula, derive
from harness.formula import in_dimensions
from harness.formula.expression import Factors, Sum
from harness.hardware import find_hardware
from harness.recipe import Recipe
from harness.recipe.check import check_recipe
from harness.training.model import build_model
from tests.support.long import but_for
from tests.support.releases import keeps_workspaces
from tests.support.tiny import cut, tiny

H100 = find_hardware("h100")
QLORA = tiny(
    adapter="lora", quantization="nf4", double_quant=True, lora_rank=4, micro_batch_size=2, seq_len=128
)
RECIPES = {
    "of half a byte": (QLORA, "quantize_4bit", Fraction(1, 2)),
    "constants of one byte for 64": (QLORA, "quantize_blockwise", Fraction(1, 64)),
    "constants of four bytes for 64": (
        QLORA.model_copy(update={"double_quant": False}),
        "quantize_4bit",
        Fraction(4, 64),
    ),
    "of two bytes": (tiny(precision="bf16", micro_batch_size=2, seq_len=128), "empty", Fraction(2)),
}


def of_one(formula: DerivedFormula, spelled: str) -> tuple[int, Fraction]:
    """How many numbers the product in front of the bytes is, and how many bytes each has."""
    product, width = re.fullmatch(r"(\S+) × (\S+) B", spelled).groups()
    sizes = {**formula.dimensions, "1": 1, "2": 2, "3": 3}
    return prod(sizes[letter] for letter in product.split("·")), Fraction(width)


@pytest.mark.parametrize("name", RECIPES)
def test_a_weight_is_spelled_as_its_module_has_it(name: str) -> None:
    recipe, operator, width = RECIPES[name]
    formula = derive(recipe, H100)
    shapes = {
        re.sub(r"\.\d+\.", ".*.", module): weight.shape for module, weight in linear_weights(recipe).items()
    }
    seen = set()
    for term in formula.terms.terms:
        module = term.module.removeprefix("base_model.model.").removesuffix(".base_layer")
        if (term.category, term.operator) == ("parameters", operator) and module in shapes:
            numbers, found = of_one(formula, formula.spelled(term))
            if found == width:
                assert numbers == prod(shapes[module]), module
                seen.add(module)
    assert seen | {"lm_head"} == {*shapes}  # it is not quantized


def linear_weights(recipe: Recipe) -> dict:
    """The weight of each linear layer of the model without its adapters, by the layer's path."""
    plain = recipe.model_copy(update={"adapter": "none", "quantization": "none"})
    model = build_model(plain, torch.device("cpu"))
    return {n: m.weight for n, m in model.named_modules() if n.endswith(("_proj", "lm_head"))}


MODELS = ("gpt2-small", "mixtral-8x7b", "qwen3-next-80b-a3b", "gemma-3-1b", "phi-4")


@pytest.mark.parametrize("model", but_for(("phi-4",), {name: name for name in MODELS}))
def test_what_a_model_holds_is_spelled(model: str, tmp_path: Path) -> None:
    """All but a few in a hundred of the bytes at the peak: phi-4 has queries, keys and values in one."""
    fields = {"model": model, "adapter": "lora", "micro_batch_size": 2, "seq_len": 512}
    recipe = cut(check_recipe(fields, model), tmp_path, blocks=4)
    formula = derive(recipe, H100)
    spelled = {term: formula.spelled(term) for term in formula.terms.terms if term.operator != "workspace"}
    plain = sum(term.rounded_bytes for term, text in spelled.items() if re.match(r"[\d,]{2,} B|\d\d", text))
    assert plain < 0.05 * formula.terms.total_bytes


@keeps_workspaces
def test_what_no_tensor_has_is_no_product() -> None:
    """cuBLAS keeps 32 MiB, as many bytes as H·H numbers of two bytes here."""
    formula = derive(tiny(micro_batch_size=2, seq_len=128), H100)
    workspace = next(term for term in formula.terms.terms if term.operator == "workspace")
    assert formula.spelled(workspace) == "33,554,432 B"


NAMES = {"H": 4096, "F": 14336, "K": 1024, "X": 8, "T": 2, "D": 128}


@pytest.mark.parametrize(
    ("numbers", "factors", "width", "said"),
    [
        (3 * 4096 * 4096, (), 2, "3·H·H × 2 B"),  # queries, keys and values in one
        (2 * 8 * 14336 * 4096, (), Fraction(1, 2), "2·H·F·X × 1/2 B"),  # gate and up of all experts in one
        (2 * 14336, (1, 1), 2, "B·S·F·T × 2 B"),  # one row for each of the experts that a token is sent to
        (128, (0, 1), 2, "S·D × 2 B"),  # rotary positions
        (128, (), 4, "D × 4 B"),
        (12345, (), 1, "12,345 B"),
    ],
)
def test_by_the_bytes_of_one_number(numbers, factors, width, said) -> None:
    size = Sum(((numbers * Fraction(width), Factors(*factors)),))
    assert in_dimensions(size, NAMES, (Fraction(width),)) == said


@pytest.mark.parametrize(
    ("expected", "said"), [("", "F·Q × 2 B"), ("XT", "2·H·E·X × 2 B"), ("R", "F·Q × 2 B")]
)
def test_a_tensor_has_the_dimensions_that_its_module_has(expected: str, said: str) -> None:
    """Of gate and up of 128 experts of Qwen3-30B-A3B in a layer: as many as of other letters, by chance."""
    names = {"H": 2048, "F": 6144, "E": 768, "X": 128, "Q": 65_536}
    size = Sum(((Fraction(2 * 2048 * 768 * 128 * 2), Factors()),))
    assert in_dimensions(size, names, (Fraction(2),), expected=expected) == said


def test_a_part_of_a_weight_on_each_of_several_gpus() -> None:
    size = Sum(((Fraction(4096 * 14336 * 2, 8), Factors()),))
    assert in_dimensions(size, NAMES, (Fraction(2),), parts=8) == "H·F/8 × 2 B"


def test_a_size_seen_at_one_batch_and_length_has_both() -> None:
    size = Sum(((Fraction(8 * 1024 * 4096 * 2), Factors()),))
    names = {"B": 8, "S": 1024, **NAMES}
    assert in_dimensions(size, names, (Fraction(2),), of_tokens=True) == "B·S·H × 2 B"
