"""How a number of processes fills the mesh that a recipe asks for."""

from typing import Any

import pytest

from harness.errors import InputError
from harness.recipe import Recipe, on_ranks, surprises_of_mesh


def sizes(recipe: Recipe) -> tuple[int, int, int]:
    return recipe.dp_replicate, recipe.dp_shard, recipe.tp


@pytest.mark.parametrize(
    ("fields", "num_ranks", "filled"),
    [
        ({}, 1, (1, 1, 1)),
        ({"parallel": "ddp"}, 1, (1, 1, 1)),
        ({"parallel": "ddp"}, 8, (8, 1, 1)),
        ({"parallel": "fsdp"}, 8, (1, 8, 1)),
        ({"parallel": "fsdp", "dp_replicate": 2}, 8, (2, 4, 1)),
        ({"parallel": "fsdp", "dp_replicate": 2, "dp_shard": 4}, 8, (2, 4, 1)),
        ({"parallel": "fsdp", "dp_replicate": 8}, 8, (8, 1, 1)),
        ({"parallel": "tp"}, 4, (1, 1, 4)),
        ({"parallel": "fsdp+tp", "tp": 2}, 8, (1, 4, 2)),
        ({"parallel": "fsdp+tp", "tp": 2, "dp_replicate": 2}, 8, (2, 2, 2)),
    ],
)
def test_the_size_that_is_left_is_filled(
    fields: dict[str, Any], num_ranks: int, filled: tuple[int, int, int]
) -> None:
    recipe = on_ranks(Recipe(model="smoke", **fields), num_ranks, "--gpus")
    assert sizes(recipe) == filled
    assert recipe.world_size == num_ranks


@pytest.mark.parametrize(
    ("fields", "num_ranks", "said"),
    [
        ({}, 2, "--gpus: parallel: none is a step of one process. Set parallel=fsdp"),
        ({"parallel": "fsdp", "dp_shard": 3}, 8, "dp_replicate 1 x dp_shard 3 x tp 1 = 3, and there are 8"),
        ({"parallel": "fsdp+tp", "tp": 3}, 8, "dp_shard 1 x tp 3 = 3, and there are 8 processes"),
        ({"parallel": "fsdp", "dp_replicate": 2, "dp_shard": 4}, 2, "or start 8"),
    ],
)
def test_a_mesh_that_does_not_multiply_to_the_processes_is_a_sentence(
    fields: dict[str, Any], num_ranks: int, said: str
) -> None:
    with pytest.raises(InputError) as caught:
        on_ranks(Recipe(model="smoke", **fields), num_ranks, "--gpus")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"parallel": "ddp"}, "dp_replicate"),
        ({"parallel": "fsdp"}, "dp_shard"),
        ({"parallel": "tp"}, "tp"),
        ({"parallel": "fsdp+tp"}, "dp_shard"),
    ],
)
def test_a_way_to_divide_without_a_number_of_gpus_is_said(fields: dict[str, Any], size: str) -> None:
    """The estimate is of one GPU, which `parallel` alone does not let expect."""
    (warning,) = surprises_of_mesh(Recipe(model="smoke", **fields))
    assert warning.endswith(f"Set {size} to their number, as in {size}=8")
    assert surprises_of_mesh(Recipe(model="smoke", **fields, **{size: 2})) == []
    assert surprises_of_mesh(Recipe(model="smoke")) == []
