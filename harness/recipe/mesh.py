"""The mesh of ranks that a recipe describes, and its sizes for a number of processes. Imports no torch."""

from harness.errors import InputError
from harness.recipe.check import check_recipe
from harness.recipe.recipe import Recipe

FILLED = {"ddp": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "fsdp+tp": "dp_shard"}
"""By value of `parallel`: the mesh size that a number of processes sets, where the recipe leaves it 1."""

OF_RANKS = (
    *("parallel", "dp_replicate", "dp_shard", "tp", "reshard_after_forward", "reduce_dtype"),
    *("sync_each_micro_batch", "wrap", "cpu_offload"),
)
"""The fields that say how a step is divided among ranks. They change nothing for a single process."""


def surprises_of_mesh(recipe: Recipe) -> list[str]:
    """A warning about a recipe that says how to divide a step, and leaves the GPUs at 1; else none."""
    if not recipe.distributed or recipe.world_size > 1:
        return []
    size = FILLED[recipe.parallel]
    among = f"parallel: {recipe.parallel}: of 1 GPU, so nothing is divided"
    return [f"{among}. Set {size} to their number, as in {size}=8"]


def on_more_ranks(recipe: Recipe, times: int) -> Recipe:
    """`recipe`, which is of several ranks, on `times` as many. Raises InputError where that is impossible."""
    filled = FILLED[recipe.parallel]
    return check_recipe({**recipe.model_dump(), filled: getattr(recipe, filled) * times}, f"{times} times")


def on_ranks(recipe: Recipe, num_ranks: int, asked_by: str) -> Recipe:
    """`recipe` with mesh sizes that multiply to `num_ranks`. `asked_by` names the origin of that number in
    error messages: "--gpus 8".

    If the size that FILLED names is 1, it becomes `num_ranks` over the product of the other sizes. Raises
    InputError where that is no whole number, and for a recipe of one process.
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
    size, remainder = divmod(num_ranks, recipe.world_size)
    if getattr(recipe, filled) == 1 and not remainder and size:
        return check_recipe({**recipe.model_dump(), filled: size}, asked_by)
    mesh = " x ".join(f"{name} {getattr(recipe, name)}" for name in ("dp_replicate", "dp_shard", "tp"))
    raise InputError(
        f"{asked_by}: the mesh of the recipe is {mesh} = {recipe.world_size}, and there are {num_ranks} "
        f"processes. Set sizes that multiply to {num_ranks}, or start {recipe.world_size}."
    )
