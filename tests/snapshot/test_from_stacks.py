"""Phases and categories read from stacks. The real thing: tests/virtual_gpu/test_snapshots.py holds every
category of a recording that states them against what its stacks alone say."""

from typing import Any

import pytest

from harness.snapshot import recording_of, spans_from_trace
from harness.snapshot.from_stacks import OWN_CODE, label_from_phases, phase_of_stack, phases_of_trace
from harness.snapshot.stacks import gathers, is_library, own_place

SITE = "/venv/lib/python3.12/site-packages/"
MAIN = ("/home/me/train.py", "<module>")
CALL = (f"{SITE}torch/nn/modules/module.py", "_call_impl")
FORWARD = ((f"{SITE}torch/nn/modules/linear.py", "forward"), CALL, ("/home/me/net.py", "forward"), CALL, MAIN)
STEP = (
    (f"{SITE}torch/optim/adamw.py", "_multi_tensor_adamw"),
    (f"{SITE}torch/optim/optimizer.py", "wrapper"),
    MAIN,
)
ZERO_GRAD = ((f"{SITE}torch/optim/optimizer.py", "zero_grad"), (f"{SITE}torch/_compile.py", "inner"), MAIN)
BACKWARD = (
    (f"{SITE}torch/autograd/__init__.py", "_make_grads"),
    (f"{SITE}torch/_tensor.py", "backward"),
    MAIN,
)
MOVE = (
    (f"{SITE}torch/nn/modules/module.py", "convert"),
    (f"{SITE}torch/nn/modules/module.py", "_apply"),
    (f"{SITE}torch/nn/modules/module.py", "to"),
    MAIN,
)


def frames(stack: tuple[tuple[str, str], ...]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": 7, "name": name} for file, name in stack]


def fsdp(*calls: str) -> tuple[tuple[str, str], ...]:
    """FSDP2's frames, innermost first, as "file function"."""
    folder = f"{SITE}torch/distributed/fsdp/_fully_shard/"
    return tuple((f"{folder}{file}.py", name) for file, name in (call.split() for call in calls))


@pytest.mark.parametrize(
    ("gathered", "stack"),
    [
        (True, fsdp("_fsdp_collectives allocate", "_fsdp_collectives foreach_all_gather")),
        (True, fsdp("_fsdp_param alloc_storage", "_fsdp_param alloc_all_gather_outputs")),
        (True, (("??", "at::detail::empty_cuda(...)"), *fsdp("_fsdp_param init_all_gather_outputs"))),
        # lists of addresses, the reduce-scatter's input, a parameter's part, what a module in a unit asks for
        (False, fsdp("_fsdp_collectives foreach_all_gather_copy_out")),
        (False, fsdp("_fsdp_collectives allocate", "_fsdp_collectives foreach_reduce")),
        (False, fsdp("_fsdp_param _init_sharded_param")),
        (False, (*FORWARD, *fsdp("_fsdp_collectives foreach_all_gather"))),
        (False, ()),
    ],
)
def test_what_fsdp2_gathers_shows_in_its_stack(gathered: bool, stack: tuple[tuple[str, str], ...]) -> None:
    assert gathers(frames(stack)) is gathered


@pytest.mark.parametrize(
    ("phase", "stack"),
    [
        ("forward", FORWARD),
        ("forward", ((f"{SITE}torch/nn/functional.py", "cross_entropy"), MAIN)),
        ("optimizer_step", STEP),
        ("optimizer_step", ((f"{SITE}bitsandbytes/optim/optimizer.py", "init_state"), MAIN)),
        ("optimizer_step", ((f"{SITE}torch/nn/utils/clip_grad.py", "_get_total_norm"), MAIN)),
        ("optimizer_step", ((f"{SITE}apex/optimizers/fused_adam.py", "step"), MAIN)),
        ("backward", BACKWARD),
        (OWN_CODE, ZERO_GRAD),
        (OWN_CODE, ((f"{SITE}torch/nn/modules/module.py", "zero_grad"), MAIN)),
        ("setup", MOVE),
        ("setup", ((f"{SITE}transformers/modeling_utils.py", "from_pretrained"), MAIN)),
        ("data", ((f"{SITE}torch/utils/data/_utils/pin_memory.py", "pin_memory"), MAIN)),
        ("data", ((f"{SITE}accelerate/data_loader.py", "__iter__"), MAIN)),
        ("checkpoint", ((f"{SITE}torch/serialization.py", "save"), MAIN)),
        ("evaluation", (*FORWARD[:-1], (f"{SITE}transformers/trainer.py", "evaluation_loop"), MAIN)),
        ("evaluation", (*FORWARD[:-1], (f"{SITE}transformers/generation/utils.py", "_sample"), MAIN)),
        # autograd's thread begins in the middle of Python: a recomputed forward, a Function's backward
        ("backward", (*FORWARD[:-1], (f"{SITE}torch/utils/checkpoint.py", "unpack_hook"))),
        ("backward", (("/home/me/op.py", "backward"), (f"{SITE}torch/autograd/function.py", "apply"))),
        # with C++ frames the engine itself shows
        (
            "backward",
            (("??", "at::_ops::mm::call(at::Tensor)"), ("??", " torch::autograd::Engine::thread_main()")),
        ),
        (OWN_CODE, (("/home/me/train.py", "load"), MAIN)),
        (None, (("??", "at::_ops::mm::call(at::Tensor)"),)),
        (None, ()),
    ],
)
def test_the_phase_a_stack_shows(phase: str | None, stack: tuple[tuple[str, str], ...]) -> None:
    assert phase_of_stack(frames(stack)) == phase


def entry(action: str, addr: int, stack: tuple[tuple[str, str], ...] = (), size: int = 512) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "frames": frames(stack)}


LOAD = (("/home/me/train.py", "load"), MAIN)
LOSS = (("/home/me/train.py", "loss"), MAIN)
STEP_OF_A_LOOP = [
    entry("alloc", 512, MOVE),  # 0: a parameter
    entry("alloc", 1024, LOAD),  # 1: a batch
    entry("alloc", 1536, FORWARD),  # 2: an activation
    entry("alloc", 2048, FORWARD),  # 3: dropped within forward
    entry("free_requested", 2048, FORWARD),
    entry("alloc", 2560, LOSS),  # 5: the loss
    entry("alloc", 3072, BACKWARD),  # 6: the root gradient
    entry("alloc", 3584),  # 7: a gradient, from autograd's thread
    entry("free_requested", 1536),
    entry("free_requested", 3072),
    entry("alloc", 4096, STEP),  # 10: optimizer state
    entry("alloc", 4608, STEP),  # 11: dropped within the step
    entry("free_requested", 4608, STEP),
    entry("free_requested", 3584, STEP),
    entry("free_requested", 1024, LOAD),
    entry("free_requested", 2560, LOAD),
]


def test_a_loop_is_read_phase_by_phase() -> None:
    """What autograd's thread does has no Python stack: after backward() was called it is backward's."""
    expected = [
        "setup",
        OWN_CODE,
        *["forward"] * 4,
        *["backward"] * 4,
        *["optimizer_step"] * 4,
        *[OWN_CODE] * 2,
    ]
    assert phases_of_trace(STEP_OF_A_LOOP) == expected


def test_categories_follow_from_the_phases() -> None:
    recording = recording_of({"segments": [], "device_traces": [STEP_OF_A_LOOP]})
    assert recording.from_stacks
    assert recording.categories is not None
    born = dict(zip((span.born for span in recording.spans), recording.categories, strict=True))
    assert born == {
        0: "parameters",
        1: "other",
        2: "activations",
        3: "temporaries",
        5: "activations",
        6: "temporaries",
        7: "gradients",
        10: "optimizer_state",
        11: "temporaries",
    }


def test_gradients_that_are_dropped_before_backward_are_no_step() -> None:
    """loss = model(x); optimizer.zero_grad(); loss.backward()"""
    trace = [*STEP_OF_A_LOOP[:6], entry("free_requested", 8192, ZERO_GRAD), *STEP_OF_A_LOOP[6:]]
    assert phases_of_trace(trace)[:10] == ["setup", OWN_CODE, *["forward"] * 5, *["backward"] * 3]
    recording = recording_of({"segments": [], "device_traces": [trace]})
    assert recording.categories is not None
    born = dict(zip((span.born for span in recording.spans), recording.categories, strict=True))
    assert (born[2], born[5], born[8]) == ("activations", "activations", "gradients")


def test_what_outlives_its_step_is_no_activation() -> None:
    """A library's workspace, asked for by the first matmul of a forward; a list of outputs."""
    forever = [*STEP_OF_A_LOOP[:2], entry("alloc", 9216, FORWARD), *STEP_OF_A_LOOP[2:]]
    again = [
        entry(e["action"], e["addr"] + 2**20, (), e["size"]) | {"frames": e["frames"]}
        for e in STEP_OF_A_LOOP[1:]
    ]
    recording = recording_of({"segments": [], "device_traces": [forever + again]})
    assert recording.categories is not None
    born = dict(zip((span.born for span in recording.spans), recording.categories, strict=True))
    assert (born[2], born[3]) == ("other", "activations")


@pytest.mark.parametrize(("set_to_none", "category"), [(True, "other"), (False, "gradients")])
def test_a_workspace_of_autograd_s_thread_is_no_gradient(set_to_none: bool, category: str) -> None:
    """Seen where gradients are dropped before the next backward, and it is not."""
    kept = [e for e in STEP_OF_A_LOOP if set_to_none or (e["action"], e["addr"]) != ("free_requested", 3584)]
    first = [*kept[:8], entry("alloc", 9216), *kept[8:]]  # its first product in backward
    again = [e | {"addr": e["addr"] + 2**20} for e in kept[1:]]
    recording = recording_of({"segments": [], "device_traces": [first + again]})
    assert recording.categories is not None
    born = dict(zip((span.born for span in recording.spans), recording.categories, strict=True))
    assert (born[7], born[8]) == ("gradients", category)


@pytest.mark.parametrize("size", [2 * 4096 * 1024 + 8 * 16 * 1024, 8 * 4096 * 1024])  # CublasHandlePool.cpp
def test_the_workspaces_of_one_step_are_told_by_their_size(size: int) -> None:
    """Nothing else sets them apart: a gradient stays as long, and there is no second step."""
    one_step = [
        *(entry("alloc", 2**30 * i, MOVE, size) for i in (1, 2)),  # two parameters
        entry("alloc", 2**30 * 3, FORWARD, size),  # a workspace
        entry("alloc", 2**30 * 4, FORWARD, size),  # an activation
        entry("alloc", 2**30 * 5, BACKWARD),
        *(entry("alloc", 2**30 * i, (), size) for i in (6, 7, 8)),  # a workspace, two gradients
        entry("free_requested", 2**30 * 4),
        entry("alloc", 2**30 * 9, STEP),
    ]
    recording = recording_of({"segments": [], "device_traces": [one_step]})
    assert recording.categories is not None
    assert [*recording.categories[2:4], *recording.categories[5:8]] == [
        "other",
        "activations",
        "other",
        "gradients",
        "gradients",
    ]
    began_later = recording_of({"segments": [], "device_traces": [one_step[2:]]})
    assert began_later.categories is not None
    assert began_later.categories[0] == "activations"
    assert began_later.categories[3:6] == ["gradients"] * 3


def test_a_workspace_is_told_among_frozen_weights_of_its_size() -> None:
    """LoRA on Hopper: the base's weights have no gradients, of which there are fewer than weights, then."""
    size = 8 * 4096 * 1024
    one_step = [
        *(entry("alloc", 2**30 * i, MOVE, size) for i in (1, 2, 3)),  # frozen weights
        entry("alloc", 2**30 * 4, MOVE, 4096),  # an adapter
        entry("alloc", 2**30 * 5, FORWARD, size),  # a workspace
        entry("alloc", 2**30 * 6, BACKWARD),
        entry("alloc", 2**30 * 7, (), size),  # a workspace
        entry("alloc", 2**30 * 8, (), 4096),  # the adapter's gradient
        entry("alloc", 2**30 * 9, STEP),
    ]
    recording = recording_of({"segments": [], "device_traces": [one_step]})
    assert recording.categories is not None
    assert [recording.categories[i] for i in (4, 6, 7)] == ["other", "other", "gradients"]


def test_what_an_exception_drops_was_in_use_where_memory_ran_out() -> None:
    """Unwinding frees the activations at once, in no backward: they were activations all the same."""
    oom = {"action": "oom", "device_free": 0, "size": 2**30, "frames": frames(FORWARD)}
    trace = [*STEP_OF_A_LOOP[:3], oom, entry("free_requested", 1536, LOAD)]
    phases = phases_of_trace(trace)
    assert phases is not None
    spans = spans_from_trace(trace, phases=phases)
    label_from_phases(spans, phases, [3])
    assert [span.category for span in spans] == ["parameters", "other", "activations"]


def test_without_modules_and_optimizers_nothing_is_said() -> None:
    assert phases_of_trace([entry("alloc", 512, LOAD), entry("alloc", 1024)]) is None
    assert recording_of({"segments": [], "device_traces": [[entry("alloc", 512, LOAD)]]}).categories is None


def test_stated_phases_win() -> None:
    stated = [{**e, "user_metadata": "phase=setup"} for e in STEP_OF_A_LOOP]
    recording = recording_of({"segments": [], "device_traces": [stated]})
    assert not recording.from_stacks
    assert set(recording.phases) == {"setup"}


def test_a_file_s_long_names_take_no_longer() -> None:
    """Counted: what is searched of a name has a bound, whatever the file holds."""
    hostile = frames((("peft/" * 2**17 + "x.py", "x" * 2**20), MAIN))
    assert phase_of_stack(hostile) == OWN_CODE
    seen: dict[int, Any] = {}
    shared = frames(FORWARD)
    for _ in range(3):
        phase_of_stack([*shared], seen)
    assert len(seen) == len(shared)  # each frame is read once


def test_own_lines_are_no_library_s() -> None:
    assert own_place(frames(FORWARD)) == "me/net.py:7 forward"
    assert own_place(frames(FORWARD[:2])) is None
    assert is_library({"filename": "/usr/lib/python3.12/runpy.py", "line": 1, "name": "run"})
    assert is_library({"filename": "<frozen runpy>", "line": 1, "name": "run"})
    assert not is_library({"filename": "/home/me/train.py", "line": 1, "name": "run"})


def test_torch_profiler_s_own_categories_are_read() -> None:
    """_memory_viz.profile_plot writes them, and no times, no pools and no metadata."""
    trace = [
        {"action": "alloc", "addr": 64 * i, "size": 64, "stream": 0, "frames": [], "category": name}
        for i, name in enumerate(("parameter", "gradient", "activation", "autograd_detail", "unknown"))
    ]
    recording = recording_of({"segments": [], "device_traces": [trace]})
    assert recording.categories == ["parameters", "gradients", "activations", "other", "other"]
