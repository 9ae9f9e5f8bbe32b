"""What a training step raises in the code of a model, told as a sentence: where, what, and what to change."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

from harness.errors import InputError, is_out_of_memory
from harness.parallel import lost_rank
from harness.training.model_config import first_line

LIBRARIES = ("transformers", "peft", "transformers_modules")
"""Whose frames are a model's code."""
RAISED = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError)
RAISED += (RuntimeError, TypeError, ValueError)
"""By these types alone: those that libraries derive from them (out of memory, ranks) mean something else."""
TOO_LARGE = "Storage size calculation overflowed"
"""What torch says of a tensor that no memory could hold (ATen/EmptyTensor.cpp)."""

UNUSED = "Expected to have finished reduction in the prior iteration"
"""What DistributedDataParallel says in the second step (torch/csrc/distributed/c10d/reducer.cpp)."""


@contextmanager
def told_of_model(model: Any) -> Iterator[None]:
    """Raises InputError for what the code of `model`, or peft's around it, raises inside."""
    try:
        yield
    except RAISED as error:
        said = str(error)
        # A gather of parameters is called from the model's code too: a rank that is gone is no mistake of it.
        if type(error) not in RAISED or is_out_of_memory(error) or TOO_LARGE in said or lost_rank(said):
            raise
        told = _told(model, error)
        if told is None:
            raise
        raise told from error


def _told(model: Any, error: Exception) -> InputError | None:
    """None for what was not raised in such code: a mistake of ours is not a user's."""
    frames = traceback.extract_tb(error.__traceback__)
    package = str(PurePath(__file__).parents[1])
    places = [_in_library(frame) for frame in frames]
    place = next((place for place in reversed(places) if place), None)
    if UNUSED in str(error):
        return InputError(
            f"parallel: ddp waits for the gradient of every parameter that is trained, and some of "
            f"{model.config.model_type} have none after a step. Set parallel: fsdp, or train other layers."
        )
    if place is None or frames[-1].filename.startswith(package):
        return None
    kind = model.config.model_type
    simulated = any(parameter.is_meta for parameter in model.parameters())
    if simulated and (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
        return InputError(
            f"model: {kind} asks for values, at {place}, and its memory depends on them. A simulation has "
            "shapes and no values. `harness run RECIPE --gpu h100` runs it on a virtual GPU, where "
            "values that no kernel computed are 0, and `harness napkin` has an estimate."
        )
    said = f"{type(error).__name__}: {first_line(error)}"
    if hasattr(model, "peft_config"):
        fix = "List other layers in lora_targets, for example [q_proj, v_proj], or set adapter: none"
    elif any(frame.filename.endswith("torch/utils/checkpoint.py") for frame in frames):
        fix = "Set gradient_checkpointing: false"
    else:
        fix = "Check the sizes in its config, or choose another model: the error is in its own code"
    return InputError(f"model: a training step of {kind} fails at {place}: {said}. {fix}.")


def _in_library(frame: traceback.FrameSummary) -> str | None:
    """ "transformers/models/blt/modeling_blt.py:1060" of a frame in one of LIBRARIES."""
    parts = PurePath(frame.filename).parts
    for index, part in enumerate(parts):
        if part in LIBRARIES and parts[index - 1] in ("site-packages", "dist-packages", "modules"):
            return f"{'/'.join(parts[index:])}:{frame.lineno}"
    return None
