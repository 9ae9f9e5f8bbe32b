"""The mesh of ranks that a recipe asks for, and how a number of processes fills it. Imports no torch."""

from harness.errors import InputError
from harness.recipe.check import check_recipe
from harness.recipe.recipe import Recipe

FILLED = {"ddp": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "fsdp+tp": "dp_shard"}
"""By value of `parallel`: the size that follows from the number of processes where the recipe leaves it 1."""

OF_RANKS = (
    *("parallel", "dp_replicate", "dp_shard", "tp", "reshard_after_forward", "reduce_dtype"),
    *("sync_each_micro_batch", "wrap", "cpu_offload"),
)
"""The fields that say how a step is divided: a single process has nothing to try of them."""


def surprises_of_mesh(recipe: Recipe) -> list[str]:
    """A warning where a recipe says how to divide a step and not among how many GPUs: it is of one."""
    if not recipe.distributed or recipe.world_size > 1:
        return []
    size = FILLED[recipe.parallel]
    among = f"parallel: {recipe.parallel}: of 1 GPU, so nothing is divided"
    return [f"{among}. Set {size} to their number, as in {size}=8"]


def on_more_ranks(recipe: Recipe, times: int) -> Recipe:
    """`recipe` on so many times the ranks, of one of several. Raises InputError where it cannot be."""
    filled = FILLED[recipe.parallel]
    return check_recipe({**recipe.model_dump(), filled: getattr(recipe, filled) * times}, f"{times} times")


def on_ranks(recipe: Recipe, num_ranks: int, asked_by: str) -> Recipe:
    """`recipe` with mesh sizes that multiply to `num_ranks` (`asked_by` says who asks: "--gpus 8").

    The size FILLED names becomes what the others leave, if it was 1. Raises InputError where no such size
    is left, and for a recipe that is of one process.
    """
    if not recipe.distributed:
        if num_ranks == 1:
            return recipe
        raise InputError(
            f"{asked_by}: parallel: none is a step of one process. Set parallel=fsdp, ddp, tp or fsdp+tp."
        )
    if recipe.world_size == num_ranks:
        return recipe
    filled = FILLED[recipe.parallel]
    others, left_over = divmod(num_ranks, recipe.world_size)
    if getattr(recipe, filled) == 1 and not left_over and others:
        return check_recipe({**recipe.model_dump(), filled: others}, asked_by)
    mesh = " x ".join(f"{name} {getattr(recipe, name)}" for name in ("dp_replicate", "dp_shard", "tp"))
    raise InputError(
        f"{asked_by}: the mesh of the recipe is {mesh} = {recipe.world_size}, and there are {num_ranks} "
        f"processes. Set sizes that multiply to {num_ranks}, or start {recipe.world_size}."
    )
