"""Reads phases and categories from the stacks of a recording that states none, made by any program.

A stack shows which code asked for memory: a module's call, an optimizer, a data loader. The phase follows
from the innermost frame that shows one; the category of an allocation from the phase it was made in and the
phase it outlives, as in snapshot/attribution.py. This is inferred, and reports say so. Imports no torch.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from harness.snapshot.spans import BEFORE_RECORDING, AllocationSpan, Frame
from harness.snapshot.stacks import gathers
from harness.system import CUBLAS_WORKSPACE_BYTES, HOPPERS_CUBLAS_WORKSPACE_BYTES

OWN_CODE = "own code"
"""Memory asked for outside of any module, backward, optimizer or loader: the program's own lines."""
EVALUATION = "evaluation"
CHECKPOINT = "checkpoint"
"""A file of weights written or read; activation checkpointing is backward, as it is everywhere here."""

_PHASE_OF_FRAME = tuple(
    (phase, re.compile("|".join(patterns)))
    for phase, patterns in (
        (OWN_CODE, (r"\.py zero_grad$",)),  # of an optimizer or a module, often between forward and backward
        (
            "optimizer_step",
            (
                r"(?:torch(?:ao)?|bitsandbytes|apex|deepspeed/ops)/(?:\w+/)?(?:optim|adam)\w*(?:/|\.py )",
                r"(?:transformers|pytorch_optimizer|lion_pytorch)/(?:optimiz|lion)\w*(?:/|\.py )",
                r"(?:galore_torch|schedulefree|prodigyopt|came_pytorch|muon)/\w+\.py ",
                r"torch/nn/utils/clip_grad\.py ",
                r"torch/(?:cuda/)?amp/grad_scaler\.py ",
            ),
        ),
        (
            "data",
            (
                r"torch/utils/data/",
                r"accelerate/data_loader\.py ",
                r"accelerate/utils/operations\.py send_to_device",
                r"transformers/data/",
                r"lightning_fabric/utilities/(?:apply_func|device_dtype_mixin)\.py move_data_to_device",
            ),
        ),
        (
            CHECKPOINT,
            (
                r"torch/serialization\.py ",
                r"safetensors/torch\.py ",
                r"torch/distributed/checkpoint/",
                r"torch/nn/modules/module\.py (?:state_dict|_save_to_state_dict)$",
                r"torch/nn/modules/module\.py (?:load_state_dict|_load_from_state_dict)$",
                r"peft/utils/save_and_load\.py ",
                r"\.py _?save_(?:checkpoint|pretrained)$",
            ),
        ),
        (
            "setup",
            (
                r"torch/nn/modules/module\.py (?:_apply|convert|<lambda>|to|cuda)$",
                r"torch/nn/(?:init|parameter)\.py ",
                r"torch/nn/modules/\w+\.py (?:__init__|reset_parameters)$",
                r"transformers/(?:modeling_utils|core_model_loading|quantizers/\w+)\.py ",
                r"accelerate/(?:big_modeling|utils/modeling)\.py ",
                r"peft/\S+\.py (?:__init__|get_peft_model|inject_adapter|update_layer)$",
            ),
        ),
        ("forward", (r"torch/nn/modules/", r"torch/nn/functional\.py ", r"\.py forward$")),
    )
)
"""The phase that a frame (`folder/file.py function`) shows; the first pattern that fits decides."""
_AROUND_FORWARD = tuple(
    (phase, re.compile("|".join(patterns)))
    for phase, patterns in (
        ("backward", (r"torch/utils/checkpoint\.py (?:unpack_hook|recompute_fn)$",)),
        (
            EVALUATION,
            (
                r"(?:^|/)generation/utils\.py ",
                r"\.py (?:evaluate|predict|evaluation_loop|prediction_loop|validate|validation_step)$",
                r"/loops/evaluation_loop\.py ",
                r"\.py (?:run_eval\w*|eval_\w+|estimate_loss)$",
            ),
        ),
    )
)
"""The phase that a forward belongs to if a frame further out fits one of these patterns."""
_BACKWARD = re.compile(
    r"torch/autograd/(?:__init__|graph)\.py |torch/(?:_tensor|utils/checkpoint)\.py backward$"
    r"|torch/_functorch/\S+ backward$| torch::autograd::Engine::"
)
_THREAD_STARTS = ("<module>", "_bootstrap")
"""Functions in which Python's own threads begin. A stack without one was called by autograd's engine, in a
thread of its own."""
LONGEST_NAME = 300
"""How many characters of a file's or a function's name are looked at."""
_UP_TO_PACKAGES = re.compile(r"^.*/(?:site-packages|dist-packages)/")


class _FrameReading(NamedTuple):
    """What one frame shows: by `_PHASE_OF_FRAME`, `_AROUND_FORWARD`, `_BACKWARD` and `_THREAD_STARTS`."""

    is_python: bool
    phase: str | None
    around: str | None
    is_backward: bool
    starts_thread: bool


def _read(frame: Frame) -> _FrameReading:
    # The ends of names are enough, and keep a file's long ones from taking long.
    filename, name = frame["filename"][-LONGEST_NAME:], frame["name"][:LONGEST_NAME]
    line = f"{_UP_TO_PACKAGES.sub('', filename)} {name}"
    python = ".py " in line
    return _FrameReading(
        python,
        next((phase for phase, pattern in _PHASE_OF_FRAME if python and pattern.search(line)), None),
        next((phase for phase, pattern in _AROUND_FORWARD if python and pattern.search(line)), None),
        _BACKWARD.search(line) is not None,
        frame["name"] in _THREAD_STARTS,
    )


def phase_of_stack(frames: Sequence[Frame], known: dict[int, _FrameReading] | None = None) -> str | None:
    """The phase that a stack (innermost first) shows; OWN_CODE for Python code outside every phase; None
    without Python frames.

    Among C++ frames autograd's engine is visible; without them its thread has no stack (`phases_of_trace`).
    `known`: frames that were read before, by their identity, for millions of stacks share some thousands.
    """
    known = {} if known is None else known
    readings = [known.get(id(frame)) or known.setdefault(id(frame), _read(frame)) for frame in frames]
    python = any(reading.is_python for reading in readings)
    found = next((reading.phase for reading in readings if reading.phase), None)
    if found in (None, "forward"):
        in_engine = python and not any(reading.starts_thread for reading in readings)
        if in_engine or any(reading.is_backward for reading in readings):
            return "backward"
        found = next((reading.around for reading in readings if reading.around), found)
    return found or (OWN_CODE if python else None)


def phases_of_trace(trace: Sequence[Mapping[str, Any]]) -> list[str | None] | None:
    """The phase of every entry, read from the stacks; None where they show no module and no optimizer.

    CUDA's backward runs in a thread of its own, without Python: an entry without a stack after backward() was
    called belongs to backward. The program's own code between forward and backward is the loss; elsewhere its
    phase cannot be known.
    """
    known: dict[int, str | None] = {}
    known_frames: dict[int, _FrameReading] = {}
    read: list[str | None] = []
    called: str | None = None
    for entry in trace:
        frames = entry.get("frames", ())
        if id(frames) not in known:  # the trace keeps every stack alive
            known[id(frames)] = phase_of_stack(frames, known_frames)
        phase = known[id(frames)]
        if phase is None and called in ("backward", "forward", OWN_CODE) and not _is_global(entry):
            phase = "backward"
        elif phase is not None:
            called = phase
        read.append(phase or called)
    if not {"forward", "optimizer_step"} & set(read):
        return None
    return _with_the_loss(read)


def _is_global(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is not about one allocation but about segments or the whole device."""
    return entry["action"] not in ("alloc", "free_requested", "free_completed")


def _with_the_loss(phases: Sequence[str | None]) -> list[str | None]:
    """The same phases, but own code between forward and backward, the loss, is forward."""
    runs = [(phase, sum(1 for _ in run)) for phase, run in groupby(phases)]
    whole: list[str | None] = []
    for i, (phase, length) in enumerate(runs):
        before = runs[i - 1][0] if i else None
        after = runs[i + 1][0] if i + 1 < len(runs) else "backward"  # it ended there, out of memory perhaps
        whole += [
            "forward" if (before, phase, after) == ("forward", OWN_CODE, "backward") else phase
        ] * length
    return whole


def label_from_phases(
    spans: Iterable[AllocationSpan], phases: Sequence[str | None], ran_out: Sequence[int] = ()
) -> None:
    """Set the categories of spans whose phases were read from stacks.

    Made in setup and live when the first forward begins: parameters. Made in backward and live when the next
    optimizer step begins: gradients, unless still live in the backward after that while others were dropped,
    which is the workspace of autograd's thread. Made in an optimizer step and live when it ends: optimizer
    state. The first step's workspaces are recognized by their size, too.
    Memory from before the recording has only its stack. `ran_out`: the entries at which memory ran out; what
    is live there was in use, however soon the failing program dropped it.
    """
    ends = _ends_of_runs(phases)
    first_forward = phases.index("forward") if "forward" in phases else len(phases)
    next_step, next_backward = (_next(phases, phase) for phase in ("optimizer_step", "backward"))
    gradients_are_dropped, kept = False, list[AllocationSpan]()
    of_stack = {"setup": "parameters", "optimizer_step": "optimizer_state", "data": "inputs"}
    for span in spans:
        if span.category is not None:
            continue
        if span.born == BEFORE_RECORDING:
            span.category = of_stack.get(phase_of_stack(span.frames) or "") if span.frames else None
            continue
        if gathers(span.frames):
            span.category = "gathered_parameters"
            continue
        crossed = bisect_left(ran_out, span.born)
        in_use = crossed < len(ran_out) and span.live_at(ran_out[crossed])
        death = len(phases) if span.died is None or in_use else span.died
        after = ends[next_step[span.born]] if next_step[span.born] < len(phases) else len(phases)
        if span.birth_phase == "setup" and span.born < first_forward <= death:
            span.category = "parameters"
        elif span.birth_phase == "backward" and next_step[span.born] <= death:
            span.category = "gradients"
            gradients_are_dropped |= death < next_backward[after]
            if next_backward[after] < death:
                kept.append(span)
        elif span.birth_phase == "optimizer_step" and ends[span.born] <= death:
            span.category = "optimizer_state"
        elif span.birth_phase == "forward" and next_backward[after] < death:
            span.category = (
                "other"  # kept beyond its step and the next backward: a library's workspace, a list
            )
        elif span.birth_phase == "forward" and in_use:
            span.category = "activations"
        elif span.birth_phase in (OWN_CODE, CHECKPOINT):
            span.category = "other"
    for span in kept if gradients_are_dropped else ():  # zero_grad(set_to_none=False) keeps all of them
        span.category = "other"
    for span in _workspaces([span for span in spans if span.born != BEFORE_RECORDING], phases):
        span.category = "other"


def _workspaces(spans: Sequence[AllocationSpan], phases: Sequence[str | None]) -> Iterable[AllocationSpan]:
    """cuBLAS's workspaces, which the first step leaves behind, by their size: there may be no second step.

    One made in backward counts where forward has one, since each thread that multiplies has its own; else
    only if more gradients than parameters (some may be frozen) have that size. It is the first of its size,
    made before a gradient is multiplied. If no parameter is seen being made, the recording began later.
    """
    parameters = [span.size_bytes for span in spans if span.category == "parameters"]
    first_step = phases.index("optimizer_step") if parameters and "optimizer_step" in phases else 0
    stay = [span for span in spans if span.born < first_step and (span.died or len(phases)) > first_step]
    for size in (CUBLAS_WORKSPACE_BYTES, HOPPERS_CUBLAS_WORKSPACE_BYTES):
        forward = [span for span in stay if (span.size_bytes, span.birth_phase) == (size, "forward")]
        gradients = [span for span in stay if (span.size_bytes, span.category) == (size, "gradients")]
        yield from forward[:1]
        yield from gradients[: bool(forward) or len(gradients) > parameters.count(size)]


def _next(phases: Sequence[str | None], wanted: str) -> list[int]:
    """For every entry, and for the end, the index of the next entry of the phase `wanted`, else the end."""
    found = [len(phases)] * (len(phases) + 1)
    for i in range(len(phases) - 1, -1, -1):
        found[i] = i if phases[i] == wanted else found[i + 1]
    return found


def _ends_of_runs(phases: Sequence[str | None]) -> list[int]:
    """For every entry, the first one after it that is of another phase."""
    ends: list[int] = []
    for _, run in groupby(phases):
        length = sum(1 for _ in run)
        ends += [len(ends) + length] * length
    return ends
