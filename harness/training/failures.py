"""Turns an error that a model's own code raises in a step into a sentence: where, what, and the fix."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from harness.errors import InputError, first_line, is_out_of_memory
from harness.parallel import lost_rank

LIBRARIES = ("transformers", "peft", "transformers_modules", "trl")
"""Packages whose code counts as a model's."""
DIVIDING = ("torch", "distributed")
"""The package that divides a model among ranks: what it refuses, it refuses of the model."""
RAISED = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError)
RAISED += (RuntimeError, TypeError, ValueError)
"""Types of errors that are explained. Types that libraries derive from them (out of memory, lost ranks) mean
something else, and are not."""
TOO_LARGE = "Storage size calculation overflowed"
"""torch's message about a tensor that no memory could hold (ATen/EmptyTensor.cpp)."""

UNUSED = "Expected to have finished reduction in the prior iteration"
"""DistributedDataParallel's message, in the second step, about parameters without a gradient
(torch/csrc/distributed/c10d/reducer.cpp)."""


NO_VALUES = (
    "A simulation has shapes and no values. `harness run RECIPE --gpu h100` runs it on a virtual GPU, where "
    "values that no kernel computed are 0, and `harness napkin` has an estimate."
)


FULL_PRECISION = "quantization: none, or adapter: lora: not every method of peft adapts quantized layers"
"""The fix where another method fails on them."""


def needs_values(model: Any, error: Exception) -> bool:
    """Whether a simulation of `model` failed for want of values: it has none to copy, or to place in a sparse
    tensor."""
    simulated = any(parameter.is_meta for parameter in model.parameters())
    return simulated and (isinstance(error, NotImplementedError) or "meta tensor" in str(error))


@contextmanager
def errors_explained(model: Any) -> Iterator[None]:
    """Raises InputError for an error of the code of `model`, or of peft's around it, in the `with` block."""
    try:
        yield
    except RAISED as error:
        message = str(error)
        # the model's code also calls the gathering of parameters: a rank that is lost is not its mistake
        if type(error) not in RAISED or is_out_of_memory(error) or TOO_LARGE in message or lost_rank(message):
            raise
        explained = _explained(model, error)
        if explained is None:
            raise
        raise explained from error


def _explained(model: Any, error: Exception) -> InputError | None:
    """The error explained; None if no model's code raised it: a mistake of harness is not the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    package = PurePath(__file__).parents[1]
    places = [_in_library(frame) for frame in frames]
    place = next((place for place in reversed(places) if place), None)
    if UNUSED in str(error):
        return InputError(
            f"parallel: ddp waits for the gradient of every parameter that is trained, and some of "
            f"{model.config.model_type} have none after a step. Set parallel: fsdp, or train other layers."
        )
    kind = model.config.model_type
    if place is not None and needs_values(model, error):
        return InputError(
            f"model: {kind} asks for values, at {place}, and its memory depends on them. {NO_VALUES}"
        )
    if any(pair == DIVIDING for pair in pairwise(PurePath(frames[-1].filename).parts)):
        return InputError(
            f"parallel: PyTorch cannot divide {kind} so: {first_line(error).rstrip('.?')}. Set parallel: "
            "ddp, or, where it is about dtypes, precision: bf16-mixed."
        )
    # what a virtual GPU's operator raises, a GPU's would
    last = PurePath(frames[-1].filename)
    if place is None or (last.is_relative_to(package) and not last.is_relative_to(package / "virtual_gpu")):
        return None
    message = f"{type(error).__name__}: {first_line(error)}"
    stored = {type(parameter).__name__ for parameter in model.parameters()}
    if stored & {"Params4bit", "Int8Params"} and model.peft_config["default"].peft_type != "LORA":
        fix = f"Set {FULL_PRECISION}"
    elif hasattr(model, "peft_config"):
        fix = "List other layers in lora_targets, for example [q_proj, v_proj], or set adapter: none"
    elif any(frame.filename.endswith("torch/utils/checkpoint.py") for frame in frames):
        fix = "Set gradient_checkpointing: false"
    else:
        fix = "Check the sizes in its config, or choose another model: the error is in its own code"
    return InputError(f"model: a training step of {kind} fails at {place}: {message}. {fix}.")


def _in_library(frame: traceback.FrameSummary) -> str | None:
    """A frame's place in one of LIBRARIES, as "transformers/models/blt/modeling_blt.py:1060"; else None."""
    parts = PurePath(frame.filename).parts
    for index, part in enumerate(parts):
        if part in LIBRARIES and parts[index - 1] in ("site-packages", "dist-packages", "modules"):
            return f"{'/'.join(parts[index:])}:{frame.lineno}"
    return None
