"""The report's first sentences: the verdict, the peak, what it is made of, what would save memory."""

from pathlib import Path

import pytest

from harness.architecture import load_shape
from harness.hardware import find_hardware
from harness.napkin import predict
from harness.recipe import load_recipe
from harness.report import ReportRun, read_run
from harness.report.first_words import first_words
from harness.report.stacks import CallTree
from harness.step_profile import Allocation, StepProfile
from tests.support.commands import Call

GIB = 2**30


def llama() -> StepProfile:
    profile = predict(load_recipe("llama-3.1-8b-qlora")[1], find_hardware("rtx-4090"))
    profile.memory.process_bytes = 15 * GIB
    logits = 1 * 2048 * 128_256 * 4
    profile.top = [
        Allocation(size_bytes=logits, category="activations"),
        Allocation(size_bytes=logits // 2, category="temporaries"),  # in bf16
        Allocation(size_bytes=logits, category="parameters"),  # as large by chance
        Allocation(size_bytes=logits, category="optimizer_state"),
        Allocation(size_bytes=logits, category="gradients"),
        Allocation(size_bytes=logits, category="temporaries", phase="optimizer_step"),
        Allocation(size_bytes=logits, category="temporaries", stack=["torch/optim/adam.py:790 adam"]),
        Allocation(size_bytes=logits + 2 * 2**20, category="activations"),
    ]
    return profile


def test_the_sentences_say_what_the_profile_holds() -> None:
    profile = llama()
    run = ReportRun("r", profile, shape=load_shape("llama-3.1-8b"), changes=["a", "b", "c", "d"])
    words = first_words(run)
    spare = (profile.hardware.memory_bytes or 0) / GIB - 15
    assert words[0] == f"Fits in the 23.64 GiB of rtx-4090 with {spare:.2f} GiB to spare."
    peak = profile.memory.peak_allocated_bytes or 0
    assert words[1] == f"The peak, {peak / GIB:.2f} GiB allocated, is in {profile.memory.peak_phase}."
    assert words[2].startswith("The largest part of it is parameters: 61%")
    # 2,048 tokens of 128,256 words: 4 bytes and 2 bytes each, of the whole peak
    share = 6 * 2048 * 128_256 / peak
    assert words[3].startswith("2 tensors the size of the logits (2,048 tokens × 128,256 words")
    assert words[3].endswith(f"are {share:.0%} of the peak.")
    assert words[4] == "These changes would save most, by arithmetic: a; b; c."


@pytest.mark.parametrize(
    ("more_bytes", "said"),
    [(-128_256 * 4 - 512, False), (0, True), (4096, True), (2**20, True), (2**20 + 512, False)],
)
def test_a_block_may_have_a_rest_that_the_allocator_does_not_split_off(more_bytes: int, said: bool) -> None:
    """Of at most 1 MiB: kSmallSize in c10/cuda/CUDACachingAllocator.h."""
    profile = llama()
    profile.top = [Allocation(size_bytes=2048 * 128_256 * 4 + more_bytes, category="activations")]
    words = first_words(ReportRun("r", profile, shape=load_shape("llama-3.1-8b")))
    assert any("the size of the logits" in sentence for sentence in words) is said


def test_what_is_not_known_is_not_said() -> None:
    assert first_words(ReportRun("snapshot alone")) == []
    profile = llama()
    profile.recipe = {"micro_batch_size": "many", "seq_len": None}
    assert len(first_words(ReportRun("r", profile, shape=load_shape("llama-3.1-8b")))) == 3


def test_of_a_pair_both_texts_have_logits() -> None:
    """Two rows of 2,048 tokens and 128,256 words, each number in bf16."""
    profile = llama()
    profile.recipe = {**(profile.recipe or {}), "task": "orpo", "lora_dropout": 0.0}
    profile.top = [Allocation(size_bytes=2 * 2048 * 128_256 * 2, category="activations")]
    words = first_words(ReportRun("r", profile, shape=load_shape("llama-3.1-8b")))
    assert words[3].startswith("One tensor the size of the logits (4,096 tokens × 128,256 words")


def test_the_report_of_a_simulation_begins_with_them(call: Call) -> None:
    recipe = ("tinyllama-lora", "seq_len=256", "hardware=l4")
    for command in (["simulate", *recipe, "--out", "run"], ["report", "run"]):
        assert call(*command)[0] == 0
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "<title>tinyllama-lora" in page  # not the folder's name
    answer = page.index('class="answer"')
    assert answer < page.index("Memory over time") < page.index("What this report cannot show")
    assert "These changes would save most, by arithmetic: " in page[answer : answer + 2000]
    run = read_run(Path("run"))
    assert run.history is not None
    outermost = {
        run.history.tree.stack(run.history.tree.node_of(span.frames))[-1]
        for span in run.history.spans
        if span.frames
    }
    assert outermost
    assert not [
        line for line in outermost if line.startswith(("harness/cli", "harness/simulate", "typer", "click"))
    ]


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        ("/usr/lib/python3.12/site-packages/typer/main.py", False),
        ("/x/harness/cli/estimates/simulate.py", False),
        ("/x/harness/measure/measured_run.py", False),
        ("/x/harness/training/loop.py", False),
        ("/usr/local/bin/harness", False),
        ("<frozen runpy>", False),
        ("??", False),
        ("/pytorch/c10/cuda/CUDACachingAllocator.cpp", False),
        ("/x/harness/training/step.py", True),
        ("/x/harness/training/toggles/offload.py", True),
        ("/home/me/clickhouse/train.py", True),
        ("/usr/lib/python3.12/site-packages/torch/nn/functional.py", True),
    ],
)
def test_stacks_leave_out_who_runs_the_step(file: str, kept: bool) -> None:
    tree = CallTree()
    inner = {"filename": "/x/model.py", "line": 1, "name": "forward"}
    node = tree.node_of([inner, {"filename": file, "line": 2, "name": "outer"}])
    assert len(tree.stack(node)) == 1 + kept
