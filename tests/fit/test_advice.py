"""What is said when the memory ran out."""

import re
from typing import Any

import pytest

from harness.fit import advice as oom
from harness.fit import tensor_in_words
from harness.fit.advice import MOST_CHANGES, advise
from harness.hardware.hardware import find_hardware, with_memory
from harness.napkin import estimate
from harness.recipe import Recipe, check_recipe
from harness.simulate.simulated_run import simulate
from harness.step_profile import (
    Allocation,
    HardwareSummary,
    MemoryStats,
    OutOfMemoryReport,
    StepProfile,
    explain_oom,
)
from harness.system.strict_yaml import parse_yaml
from tests.support.tiny import cut

GIB = 2**30
IN_FORWARD = OutOfMemoryReport(phase="forward")
DEVICE = with_memory(find_hardware("a100-80gb"), 24 * GIB)
A100 = DEVICE.summary("bf16")
REAL_A100 = HardwareSummary(name="NVIDIA A100-SXM4-80GB", kind="cuda", memory_bytes=24 * GIB)
UNLISTED = HardwareSummary(name="A GPU of next year", kind="cuda", memory_bytes=24 * GIB)
HOST = HardwareSummary(name="A CPU", kind="cpu", memory_bytes=64 * GIB)
LINE = re.compile(
    r"(?P<changes>.+=.+): (?P<saved>[\d.,]+) (?P<unit>[KMG]iB) less(, time a token × (?P<time>\d+\.\d\d))?"
    r"(?P<row> \([\d.,]+ [KMG]iB a row\))?"
    r"(?P<other>, another training)?(?P<enough>, enough by itself|, may be enough)?"
    r"(?P<where>, not on Windows or WSL)?"
)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Four of the 32 blocks, for an A100 of 24 of its 80 GiB."""
    recipe = Recipe(model="llama-3.1-8b", micro_batch_size=6, gradient_accumulation_steps=2)
    return cut(recipe, tmp_path_factory.mktemp("full"), 4)


@pytest.fixture(scope="module")
def lora(full: Recipe) -> Recipe:
    return full.model_copy(update={"adapter": "lora"})


def parsed(line: str) -> re.Match[str]:
    match = LINE.fullmatch(line)
    assert match, line
    return match


def changed(recipe: Recipe, line: str) -> Recipe:
    """The recipe with the overrides that the line spells."""
    pairs = [word.split("=") for word in parsed(line)["changes"].split(" ")]
    fields = {name: parse_yaml(value, name) for name, value in pairs}
    return check_recipe({**recipe.model_dump(mode="json"), **fields}, "test")


@pytest.mark.parametrize(("adapter", "device"), [("none", A100), ("lora", REAL_A100)], ids=["none", "lora"])
def test_changes_can_be_typed_and_the_cheapest_comes_first(full, adapter, device):
    recipe = full.model_copy(update={"adapter": adapter})
    lines = advise(recipe, device, IN_FORWARD)
    assert 2 <= len(lines) <= MOST_CHANGES
    assert all(changed(recipe, line) != recipe for line in lines)
    others = [bool(parsed(line)["other"]) for line in lines]
    assert others == sorted(others)  # what trains the same comes first
    for group in (False, True):
        times = [float(parsed(line)["time"]) for line in lines if bool(parsed(line)["other"]) is group]
        assert times == sorted(times)


def test_something_that_is_enough_is_among_them(monkeypatch, full):
    monkeypatch.setattr(oom, "MOST_CHANGES", 1)
    (line,) = advise(full, A100, IN_FORWARD)
    assert parsed(line)["enough"] == ", enough by itself"
    assert simulate(changed(full, line), DEVICE, explain_oom=False)[0].oom is None
    monkeypatch.setattr(oom, "MOST_CHANGES", 9)
    before = advise(full, A100, IN_FORWARD)
    assert before.index(line) > 0  # cheaper changes are not enough
    assert not any(parsed(other)["enough"] for other in before[: before.index(line)])


def test_of_a_device_that_is_not_in_the_table_nothing_is_called_enough(full):
    verdicts = {parsed(line)["enough"] for line in advise(full, UNLISTED, IN_FORWARD)}
    assert verdicts == {None, ", may be enough"}


def test_what_is_enough_only_together_is_said_and_fits():
    device = find_hardware("rtx-4090")
    recipe = check_recipe({"model": "llama-3.1-8b", "adapter": "lora", "seq_len": 16384}, "test")
    *single, last = advise(recipe, device.summary("bf16"), IN_FORWARD)
    assert not any(parsed(line)["enough"] for line in single)
    overrides = last.removeprefix("together ").removesuffix(", may be enough").split()
    assert len(overrides) > 1
    fields = {name: parse_yaml(value, name) for name, value in (word.split("=") for word in overrides)}
    together = check_recipe({**recipe.model_dump(mode="json"), **fields}, "test")
    assert estimate(together, device).required_bytes <= device.memory_bytes


def test_what_nothing_helps_is_said():
    recipe = check_recipe({"model": "llama-3.1-70b", "adapter": "lora", "quantization": "nf4"}, "test")
    lines = advise(recipe, find_hardware("l4").summary("bf16"), IN_FORWARD)
    assert "a device with more memory" in lines[-1]


def test_a_saving_is_what_the_change_saves():
    """About, by arithmetic: against the real step on shape-only tensors, through a model of the allocator."""
    recipe = Recipe(model="llama-3.2-1b", micro_batch_size=8, seq_len=2048)
    hardware = find_hardware("a100-80gb")

    def peak(recipe: Recipe) -> int:
        return simulate(recipe, hardware)[0].memory.peak_allocated_bytes or 0

    before = peak(recipe)
    seen = set()
    for line in advise(recipe, A100, IN_FORWARD):
        match = parsed(line)
        saved = float(match["saved"]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match["unit"]]
        if "fused_linear" not in line:  # Liger's kernels do not run here
            assert saved == pytest.approx(before - peak(changed(recipe, line)), rel=0.15), line
            seen.add(match["changes"])
    assert len(seen) >= 3


def test_times_are_those_of_a_device_that_is_known(full):
    assert not any(parsed(line)["time"] for line in advise(full, UNLISTED, IN_FORWARD))
    assert all(parsed(line)["time"] for line in advise(full, REAL_A100, IN_FORWARD))


def test_on_a_cpu_nothing_is_advised_that_a_cpu_cannot_do(full, lora):
    text = " ".join(advise(full, HOST, IN_FORWARD) + advise(lora, HOST, IN_FORWARD))
    assert "gradient_checkpointing=true" in text
    assert not re.search("offload|paged|fused_linear", text)


def test_what_rests_on_unified_memory_says_where(monkeypatch, full, lora):
    monkeypatch.setattr(oom, "MOST_CHANGES", 20)
    lines = advise(full, A100, IN_FORWARD) + advise(lora, A100, IN_FORWARD)
    assert any("paged" in line for line in lines)
    assert all(bool(parsed(line)["where"]) == ("paged" in line) for line in lines if "less" in line)


def test_a_change_is_enough_only_if_it_makes_up_for_what_was_missing_and_in_pieces(lora):
    """Arithmetic alone, which knows no fragments, may say that the recipe fits as it is."""
    device = HardwareSummary(name="NVIDIA A100-SXM4-80GB", kind="cuda", memory_bytes=80 * GIB)
    needed = estimate(lora, find_hardware("a100-80gb")).required_bytes
    roomy = device.model_copy(update={"memory_bytes": needed + 4 * GIB})
    report = OutOfMemoryReport(
        phase="backward", requested_bytes=6 * GIB, free_bytes=GIB, reserved_unallocated_bytes=5 * GIB
    )
    for line in advise(lora, roomy, report):
        if "less" in line:
            match = parsed(line)
            saved = float(match["saved"]) * {"MiB": 2**20, "GiB": GIB}[match["unit"]]
            # 5 GiB were missing; and what is needed must fit beside the 5 GiB in pieces
            assert bool(match["enough"]) == (saved >= 5 * GIB - GIB // 200), line


def test_memory_in_pieces_is_named(full):
    report = OutOfMemoryReport(phase="backward", requested_bytes=GIB, reserved_unallocated_bytes=3 * GIB)
    assert "expandable_segments:True: 3.00 GiB are reserved" in advise(full, A100, report)[0]
    smaller = report.model_copy(update={"reserved_unallocated_bytes": GIB - 1})
    assert not any("expandable_segments" in line for line in advise(full, A100, smaller))


def test_one_paragraph_says_where_what_and_how_much():
    report = OutOfMemoryReport(
        phase="backward",
        requested_bytes=2 * GIB,
        free_bytes=GIB // 2,
        top=[Allocation(size_bytes=size * GIB, category="activations") for size in (4, 2, 2, 2)],
        advice=["gradient_checkpointing=true: recomputes"],
    )
    profile = StepProfile(
        source="measured",
        recipe={},
        hardware=HardwareSummary(name="A GPU", kind="cuda"),
        memory=MemoryStats(kind="cuda_allocator"),
        oom=report,
    )
    assert explain_oom(profile) == (
        "out of memory in backward, asking for 2.00 GiB on A GPU with 0.50 GiB free. "
        "The largest tensors: 4.00 GiB of activations, 3 x 2.00 GiB of activations. "
        "What would help, by arithmetic, "
        "the cheapest first:\n"
        "  gradient_checkpointing=true: recomputes"
    )


@pytest.mark.parametrize(
    ("numbers", "each", "said"),
    [
        (128256, 4, "logits of 2 × 1,024 tokens and 128,256 words in fp32"),
        (4096, 2, "hidden states of"),
        (7, 4, ""),
    ],
)
def test_what_was_asked_for_is_named_by_its_size(numbers: int, each: int, said: str) -> None:
    """Rows times tokens times the vocabulary or the hidden size of Llama-3.1-8B's config, by hand."""
    recipe = Recipe(model="llama-3.1-8b", micro_batch_size=2, seq_len=1024)
    found = tensor_in_words(recipe, 2 * 1024 * numbers * each, "forward")
    assert (found or "").startswith(said)
    assert bool(found) == bool(said)


def test_of_pairs_both_texts_have_logits() -> None:
    recipe = Recipe(model="llama-3.1-8b", task="orpo", micro_batch_size=2, seq_len=1024)
    found = tensor_in_words(recipe, 4 * 1024 * 128256 * 2, "forward")
    assert found == "logits of 4 × 1,024 tokens and 128,256 words in 16 bit"


@pytest.mark.parametrize(
    ("fields", "numbers", "each", "named"),
    [
        ({}, 8192, 2, {"forward"}),  # an MLP's weight is as large
        ({}, 128256, 4, {"forward", "backward"}),  # in bf16 no weight has 4 bytes a number
        ({"precision": "bf16-mixed"}, 128256, 4, {"forward"}),
        ({"adapter": "lora"}, 8192, 2, {"forward", "backward"}),  # the MLP's weight gets no gradient
        ({"seq_len": 1024}, 8192, 2, {"forward", "backward"}),
    ],
)
def test_nothing_like_a_weight_is_named_where_it_may_be_a_gradient_or_optimizer_state(
    fields: dict[str, Any], numbers: int, each: int, named: set[str]
) -> None:
    """Llama-3.2-1B's hidden size is 2,048, as many as the tokens of a row."""
    recipe = check_recipe({"model": "llama-3.2-1b", "seq_len": 2048, **fields}, "test")
    size_bytes = recipe.seq_len * numbers * each
    phases = ("forward", "backward", "optimizer_step")
    assert {phase for phase in phases if tensor_in_words(recipe, size_bytes, phase)} == named
