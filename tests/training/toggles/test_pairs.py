"""Every two values of any two toggles that the rules let meet do meet here, and the recipe trains."""

import itertools
import math
import random
from importlib.util import find_spec
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from harness.recipe.fields import Adapter, Precision, Quantization
from harness.recipe.mesh import OF_RANKS
from harness.recipe.recipe import Recipe
from tests.support.tiny import tiny, train
from tests.training.toggles.test_optimizer import LOW_RANK, OPTIMIZERS

SWITCH = (False, True)
VALUES: dict[str, tuple[Any, ...]] = {
    "family": ("llama", "gpt2", "pythia", "mixtral", "gemma2"),
    "precision": get_args(Precision),
    "fp8": SWITCH if find_spec("torchao") else (False,),
    "master_weights": SWITCH,
    "quantization": get_args(Quantization),
    "double_quant": SWITCH,
    "upcast_for_kbit": SWITCH,
    "adapter": tuple(adapter for adapter in get_args(Adapter) if adapter != "peft"),
    "adapter_dtype": ("fp32", "base"),
    "lora_dropout": (0.0, 0.1),
    "gradient_checkpointing": SWITCH,
    "selective_checkpointing": SWITCH,
    "attention": ("eager", "sdpa"),
    "optimizer": tuple(OPTIMIZERS),
    "optimizer_impl": ("foreach", "fused", "for_loop"),
    "optimizer_in_backward": SWITCH,
    "offload": (
        *((), ("activations",), ("checkpoints",), ("optimizer",), ("parameters",)),
        *(("activations", "optimizer"), ("activations", "parameters"), ("optimizer", "parameters")),
    ),
    "task": ("sft", "dpo", "kto", "orpo", "grpo", "reward", "classification", "embedding"),
    "packing": SWITCH,
    "gradient_accumulation_steps": (1, 2),
    "max_grad_norm": (None, 1.0),
}
ELSEWHERE = {
    *("model", "weights", "trust_remote_code", "data"),  # test_toggles_quantization, test_data
    *(
        "loss",
        "kernels",
        "compile",
        "activation_memory_budget",
    ),  # seconds each: test_toggles_loss, test_toggles_compile
    *("lora_rank", "lora_alpha", "lora_targets", "micro_batch_size", "seq_len", "learning_rate"),  # any size
    *("weight_decay", "warmup_steps", "steps", "seed"),
    *("checkpoint_every", "on_nan"),  # between the steps: test_checkpoint_resume, test_nan
    "mlp_tiles",  # test_tiles
    *("use_rslora", "use_dora", "lora_plus_ratio", "peft"),  # test_adapter
    *("dpo_reference", "dpo_beta", "grpo_beta"),  # test_preference
    "num_labels",  # test_scores
    "optimizer_rank",  # test_optimizer
    *("images", "image_size", "train_vision"),  # test_vision
    *OF_RANKS,  # tests/parallel
}
TARGETS = {"lora": ["q_proj", "k_proj", "v_proj", "o_proj"], "ia3": ["k_proj", "v_proj"]}
"""Of the mixture: its experts in 4 bit cannot be adapted, and peft's choice for IA3 names none it has."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def recipe_of(values: dict[str, Any]) -> Recipe | None:
    """The recipe with these values, None where they cannot meet."""
    if values["family"] == "gemma2" and values["attention"] != "eager":
        return None  # test_toggles_attention
    if values["family"] == "gpt2" and (values["optimizer"] in LOW_RANK or values["fp8"]):
        return None  # it has no linear layer of torch's
    four_bit = values["quantization"] in ("nf4", "fp4") and not values["upcast_for_kbit"]
    if four_bit and values["precision"] == "fp16-mixed":
        return None  # bf16 beside fp16: the CPU's autocast, unlike a GPU's, refuses torch.cat
    fields = dict(values)
    if values["family"] == "mixtral" and values["adapter"] != "none":
        fields["lora_targets"] = TARGETS[values["adapter"]]
    try:
        return tiny(**fields)
    except ValidationError:
        return None


def covering() -> tuple[list[Recipe], set[Pair]]:
    """Few recipes that hold, between them, every pair of values that was found to meet; and the pairs."""
    choose = random.Random(0)
    usual = {name: Recipe.model_fields[name].default for name in VALUES if name != "family"}
    kept: list[dict[str, Any]] = [{"family": "llama", **usual}]
    found: list[tuple[Recipe, int]] = []
    bits: dict[Pair, int] = {}

    def some() -> dict[str, Any]:
        return {name: choose.choice(VALUES[name]) for name in choose.sample([*VALUES], choose.randrange(6))}

    def lets_be(values: dict[str, Any]) -> bool:
        if recipe := recipe_of(values):
            held = itertools.combinations(values.items(), 2)
            found.append((recipe, sum(bits.setdefault(pair, 1 << len(bits)) for pair in held)))
            kept.append(values)
        return recipe is not None

    while len(found) < 2000:  # a walk: of values chosen at random the rules refuse nearly all
        lets_be(kept[-1] | some())
    options = [[(name, value) for value in values] for name, values in VALUES.items()]
    for one, other in itertools.combinations(options, 2):
        for pair in itertools.product(one, other):
            for tried in range(0 if pair in bits else 50):
                if lets_be((kept[0] if tried % 2 else choose.choice(kept)) | some() | dict(pair)):
                    for _ in range(30):  # others that hold it, and more of what is rare
                        lets_be(kept[-1] | some() | dict(pair))
                    break
    missing, recipes = (1 << len(bits)) - 1, []
    while missing:
        recipe, held = max(found, key=lambda entry: (entry[1] & missing).bit_count())
        recipes.append(recipe)
        missing &= ~held
    return recipes, set(bits)


def test_every_toggle_is_here_or_named() -> None:
    assert set(VALUES) - {"family"} | ELSEWHERE == set(Recipe.model_fields)


def test_every_pair_trains() -> None:
    recipes, pairs = covering()
    seen = {value for pair in pairs for value in pair}
    possible = {(name, option) for name, options in VALUES.items() for option in options}
    assert possible - seen == {("offload", ("optimizer", "parameters"))}  # a rule forbids the two
    assert len(pairs) > 2000
    for recipe in recipes:
        changed = {name: value for name, value in recipe if value != Recipe.model_fields[name].default}
        losses = train(recipe, 2).losses
        assert all(map(math.isfinite, losses)), changed
        unlearned = math.log(264 if recipe.writes else 2)  # of as many words, of two answers or classes
        unlearned = 0.5 if recipe.unpaired else unlearned  # 1 - sigmoid(0)
        unlearned = math.log(264) + recipe.dpo_beta * math.log(2) if recipe.by_odds else unlearned
        unlearned = 0.0 if recipe.rewarded or recipe.embeds else unlearned  # as much gained as lost; alike
        spread = 3.0 if recipe.embeds else 0.75 if recipe.scores else 0.25  # cosines are multiplied by 20
        assert losses[0] == pytest.approx(unlearned, abs=spread), changed
