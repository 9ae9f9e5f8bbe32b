"""`harness simulate`, `harness validate` and `harness fit --exact` as a user meets them."""

import json
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from harness.recipe.file import load_recipe
from harness.snapshot.safe_read import read_snapshot
from harness.step_profile.step_profile import StepProfile
from harness.units import in_gib
from tests.support.commands import Call
from tests.support.places import LLAMA

RECIPE = f"""
# A tiny llama
model: {LLAMA}
precision: bf16
micro_batch_size: 2
seq_len: 64
"""


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """In a folder that holds tiny.yaml."""
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr("harness.answers.gathering.profiles_folder", lambda: tmp_path / "profiles")
    return call


def test_simulate_shows_tables_and_what_time_rests_on(call: Call) -> None:
    status, out, err = call("simulate", "tiny.yaml", "hardware=a100-80gb")
    assert (status, err) == (0, "")
    for word in ("simulated: one step by phase", "optimizer_step", "parameters", "device: a100-80gb"):
        assert word in out
    assert "time is an estimate, kernel by kernel: fitted to" in out
    assert not Path("profiles").exists()  # nothing is written unasked


def test_simulate_says_which_modules_and_which_allocations_make_the_peak(call: Call) -> None:
    status, out, _ = call("simulate", "tiny.yaml", "hardware=a100-80gb", "--verbose")
    _, document, _ = call("simulate", "tiny.yaml", "hardware=a100-80gb", "--json")
    profile = StepProfile.from_json(document)
    assert status == 0
    assert len(profile.top) == 20
    assert "the 20 largest allocations at the peak" in out
    lines = out.splitlines()
    largest = next(a for a in profile.top if a.stack and a.module)
    kind = re.sub(r"\.\d+", ".*", largest.module)  # layers of one kind are one line
    row = f"{in_gib(largest.size_bytes):>10}  {largest.category:15}  {kind}"
    stack = " < ".join(largest.stack[:2])
    assert any(line.endswith(row) and below.strip() == stack for line, below in pairwise(lines))
    by_module = profile.memory.at_peak_by_module or {}
    assert sum(by_module.values()) == profile.memory.peak_allocated_bytes
    both_blocks = sum(size for name, size in by_module.items() if name.endswith(".mlp.up_proj"))
    assert f"{in_gib(both_blocks):>10}  model.layers.*.mlp.up_proj" in out


def test_simulate_begins_with_the_verdict_and_says_equal_allocations_once(call: Call) -> None:
    _, out, _ = call("simulate", "tiny.yaml", "hardware=a100-80gb")
    _, document, _ = call("simulate", "tiny.yaml", "hardware=a100-80gb", "--json")
    profile = StepProfile.from_json(document)
    lines, memory = out.splitlines(), profile.memory
    spare = in_gib(profile.hardware.memory_bytes - memory.process_bytes)
    assert lines[0].startswith("tiny: fits in the ")
    assert lines[0].endswith(f" with {spare} to spare")
    assert f"{in_gib(memory.peak_allocated_bytes)} allocated, in {memory.peak_phase}" in lines[1]
    assert f"{in_gib(memory.peak_reserved_bytes)} reserved" in lines[1]
    assert " < " not in out  # stacks are for --verbose
    alike = out[out.index("the 20 largest allocations") :].split("\n\n")[0].splitlines()[1:]
    counts = [int(line.split(" x ")[0]) if " x " in line else 1 for line in alike]
    assert sum(counts) == len(profile.top) > len(alike)
    assert len(set(line.split(" x ")[-1].strip() for line in alike)) == len(alike)


def test_simulate_says_first_that_it_does_not_fit_or_that_it_is_too_tight_to_call(call: Call) -> None:
    profile = StepProfile.from_json(call("simulate", "tiny.yaml", "--memory", "80GiB", "--json")[1])
    assert profile.memory.process_bytes is not None
    needed_mib = profile.memory.process_bytes // 2**20
    status, out, err = call("simulate", "tiny.yaml", "--memory", f"{needed_mib - 1}MiB")
    assert status == 3
    assert out.startswith("tiny: does not fit on ")
    assert "out of memory in " in err
    status, out, err = call("simulate", "tiny.yaml", "--memory", f"{needed_mib + 2}MiB")
    assert (status, "out of memory" in err) == (0, False)  # too tight has the status of fits
    assert out.startswith("tiny: too tight to call in the ")
    assert " to spare, and not counted: what CUDA's libraries load" in out


def test_simulate_json_is_a_profile_and_nothing_else(call: Call) -> None:
    status, out, err = call("simulate", "tiny.yaml", "seq_len=32", "hardware=l4", "--json")
    profile = StepProfile.from_json(out)
    assert status == 0
    assert profile.source == "simulated"
    assert profile.recipe["seq_len"] == 32
    assert profile.hardware.name == "l4"
    assert "one step by phase" in err


def test_simulate_out_writes_profile_recipe_and_snapshot(call: Call) -> None:
    status, out, _ = call("simulate", "tiny.yaml", "--out", "made")
    assert status == 0
    assert "run folder: made" in out
    assert sorted(path.name for path in Path("made").iterdir()) == [
        "profile.json",
        "recipe.yaml",
        "snapshot.pickle",
    ]
    assert load_recipe("made/recipe.yaml")[1] == load_recipe("tiny.yaml")[1]
    assert StepProfile.read(Path("made/profile.json")).complete
    assert len(read_snapshot(Path("made/snapshot.pickle"))["device_traces"][0]) > 100
    status, _, err = call("simulate", "tiny.yaml", "--out", "made")
    assert status == 2
    assert "already holds" in err


def test_what_is_written_is_there_when_nobody_reads_on(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `harness simulate ... --out made | head`, which closes the pipe in the middle of the tables."""

    def closed(*_: object, **__: object) -> None:
        raise RuntimeError("nobody reads on")

    monkeypatch.setattr("harness.cli.estimates.simulate.print_profile", closed)
    with suppress(RuntimeError):
        call("simulate", "tiny.yaml", "--out", "made")
    assert StepProfile.read(Path("made/profile.json")).complete


def test_a_report_of_a_memory_that_ran_out_says_what_it_knows(call: Call) -> None:
    """A simulated allocator knows no stack of what it refused: the page has no empty place for one."""
    arguments = ("simulate", "tiny.yaml", "micro_batch_size=4000", "seq_len=2048", "hardware=l4")
    call(*arguments, "--out", "made")
    assert call("report", "made")[0] == 0
    page = Path("made/report.html").read_text()
    assert "The largest part of what was allocated is " in page
    assert "Where memory was asked for and was not there" not in page


def test_simulate_out_of_memory_exits_3_and_says_what_fills_it(call: Call) -> None:
    # 8 million tokens: their fp32 logits alone, 264 each, are 8.6 GB
    arguments = ("simulate", "tiny.yaml", "micro_batch_size=4000", "seq_len=2048", "hardware=l4")
    status, _, err = call(*arguments, "--out", "made")
    assert status == 3
    assert err.startswith("harness: out of memory in forward, asking for ")
    for words in ("on l4 with", "free", "The largest tensors:", "of activations", "What would help"):
        assert words in err
    profile = StepProfile.read(Path("made/profile.json"))
    assert profile.oom is not None
    assert not profile.complete
    actions = [e["action"] for e in read_snapshot(Path("made/snapshot.pickle"))["device_traces"][0]]
    assert actions[-2:] == ["oom", "snapshot"]


def test_simulate_goes_on_behind_the_steps(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--phases", "train,eval,save", "--eval-batches", "3", "--eval-accumulation-steps", "1", "--json")
    status, out, _ = call("simulate", "tiny.yaml", *asked)
    assert status == 0
    profile = StepProfile.from_json(out)
    assert profile.evaluation is not None
    assert (profile.evaluation.batches, profile.evaluation.accumulation_steps) == (3, 1)
    assert profile.checkpoint is not None
    monkeypatch.setattr("transformers.utils.logging._tqdm_active", False)  # as a process of its own has it
    status, out, err = call("simulate", "tiny.yaml", "--phases", "train,save")
    assert (status, err) == (0, "")
    assert "checkpoint of" in out
    assert "evaluation" not in out


def test_allocator_settings_come_from_the_option_or_the_environment(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def provenance(*options: str) -> str:
        return StepProfile.from_json(call("simulate", "tiny.yaml", "--json", *options)[1]).provenance[
            "allocator"
        ]

    assert "expandable_segments=False" in provenance()
    assert "expandable_segments=True" in provenance("--allocator", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "expandable_segments=True" in provenance()
    assert "expandable_segments=False" in provenance("--allocator", "expandable_segments:False")


def test_validate_puts_napkin_and_simulated_side_by_side(call: Call) -> None:
    status, out, _ = call("validate", "tiny.yaml", "hardware=l4")
    assert status == 0
    assert "tiny on l4; reference: simulated" in " ".join(out.split())
    assert "peak allocated" in out
    assert "unexplained, simulated - napkin:" in out


def test_validate_fails_beyond_the_tolerance(call: Call) -> None:
    status, out, err = call("validate", "tiny.yaml", "--tolerance", "0.00001", "--json")
    (comparison,) = json.loads(out)["comparisons"]
    ratio = comparison["rows"][0]["ratio"]["napkin"]
    assert ratio != 1  # napkin rounds no tensor to a block: it cannot agree so closely
    assert status == 1
    assert "off by more than 0.001%" in err
    assert "tiny napkin" in err
    assert call("validate", "tiny.yaml", "--tolerance", "1000")[0] == 0


def test_validate_finds_the_measured_profile_of_the_very_recipe(call: Call) -> None:
    """profiles/<gpu>/<recipe>.measured.json, if its recipe is the one that is asked about."""
    _, out, _ = call("simulate", "tiny.yaml", "hardware=l4", "--json")
    measured = StepProfile.from_json(out)
    measured.source = "measured"
    folder = Path("profiles/l4")
    folder.mkdir(parents=True)
    (folder / "tiny.measured.json").write_text(measured.to_json())
    _, out, _ = call("validate", "tiny.yaml", "hardware=l4", "--json")
    (comparison,) = json.loads(out)["comparisons"]
    assert comparison["reference"] == "measured"
    assert comparison["rows"][0]["ratio"]["simulated"] == 1
    assert set(comparison["rows"][0]["unexplained"]) == {"napkin", "simulated"}
    _, out, _ = call("validate", "tiny.yaml", "hardware=l4", "seq_len=32")
    assert "reference: simulated" in " ".join(out.split())
    assert "is of another recipe: seq_len is 64 and 32" in " ".join(out.split())


def test_validate_completes_profiles_and_groups_them_by_recipe(call: Call) -> None:
    for seq_len in (32, 64):
        call("simulate", "tiny.yaml", "hardware=l4", f"seq_len={seq_len}", "--out", f"s{seq_len}")
    Path("n64.json").write_text(call("napkin", "tiny.yaml", "hardware=l4", "--json")[1])
    status, out, _ = call("validate", "s32", "s64/profile.json", "n64.json", "--json")  # a run folder too
    assert status == 0
    comparisons = json.loads(out)["comparisons"]
    assert [comparison["name"] for comparison in comparisons] == ["s32", "s64"]
    assert all(comparison["rows"][0]["ratio"]["napkin"] for comparison in comparisons)


def test_validate_measures_here(call: Call) -> None:
    status, out, _ = call("validate", "tiny.yaml", "steps=1", "warmup_steps=1", "--measure", "--json")
    (comparison,) = json.loads(out)["comparisons"]
    assert status == 0
    assert comparison["reference"] == "measured"
    assert any(note.startswith("measured on a CPU") for note in comparison["notes"])
    rows = {(row["place"], row["name"]): row for row in comparison["rows"]}
    assert rows["at peak", "parameters"]["ratio"]["simulated"] == pytest.approx(1, rel=0.02)
    assert rows["forward", "FLOPs"]["ratio"]["simulated"] == 1
    assert rows["step", "time"]["ratio"]["simulated"] is None


def test_validate_says_why_an_answer_is_missing(call: Call) -> None:
    call("run", "tiny.yaml", "steps=1", "warmup_steps=1", "--out", "measured")
    document = json.loads(Path("measured/profile.json").read_text())
    document["recipe"]["compile"] = True
    Path("compiled.json").write_text(json.dumps(document))
    status, out, _ = call("validate", "compiled.json")
    assert status == 0
    assert "note: there is no simulated answer: compile: true cannot be simulated" in out


def test_every_command_that_takes_a_device_takes_its_memory(call: Call) -> None:
    tiny = ("tiny.yaml", "hardware=a100-80gb", "--memory", "2GiB", "--json")
    for command in ("napkin", "simulate"):
        profile = StepProfile.from_json(call(command, *tiny)[1])
        assert (profile.hardware.name, profile.hardware.memory_bytes) == ("a100-80gb", 2 * 2**30)
    assert call("shard", *tiny)[0] == 0
    (comparison,) = json.loads(call("validate", *tiny)[1])["comparisons"]
    assert comparison
    status, _, err = call("simulate", "tiny.yaml", "seq_len=1024", "--memory", "759MiB")
    assert status == 3
    assert "out of memory" in err


def test_fit_says_what_was_seen_and_what_was_tried(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # where a program reads, lines stay whole
    status, out, err = call("fit", "tiny.yaml", "seq_len=1024", "--memory", "872MiB")
    assert status == 0
    assert "fits as it is" in out
    assert "seen by simulating the step" in out
    assert "runs out of memory in" in out
    assert ": does not fit" in err
    assert max(map(len, out.splitlines())) <= 100
    quick = call("fit", "tiny.yaml", "seq_len=1024", "--memory", "872MiB", "--quick")
    assert "not seen to fit" in quick[1]
    assert re.findall("the model has .* parameters", quick[1]) == re.findall(
        "the model has .* parameters", out
    )
    assert quick[2] == ""
    document = json.loads(call("fit", "tiny.yaml", "seq_len=1024", "--memory", "872MiB", "--json")[1])
    tried = document["simulated"]["micro_batch_size"]["tried"]
    assert tried[str(document["largest_micro_batch_size"])] is True
    assert tried[str(document["largest_micro_batch_size"] + 1)] is False
    assert call("fit", "tiny.yaml", "--memory", "759MiB")[0] == 3


def test_fit_begins_with_what_makes_it_fit(call: Call) -> None:
    """Where a recipe does not fit, what to change is the answer, and stands in its first line."""
    asked = "tiny.yaml", "micro_batch_size=64", "seq_len=1024", "--memory", "1158MiB"
    for how, seen in ((), "it was seen to fit"), (("--quick",), "it fits by arithmetic"):
        out = call("fit", *asked, *how)[1]
        first = out.splitlines()[0]
        assert ": does not fit as it is; with " in first
        assert first.endswith(seen)
        changes = first.partition("; with ")[2].removesuffix(seen).split()
        assert call("simulate", *asked, *changes)[0] == 0


@pytest.mark.parametrize("question", [["simulate"], ["napkin"], ["fit", "--quick"]], ids=" ".join)
def test_one_gpu_of_a_step_that_is_to_be_divided_is_said(question: list[str], call: Call) -> None:
    """`parallel=fsdp` alone is of one GPU, whose memory is that of all of them."""
    command, *options = question
    said = "Set dp_shard to their number, as in dp_shard=8"
    asked = command, "tiny.yaml", "parallel=fsdp", "hardware=h100"
    assert said in " ".join(call(*asked, *options)[1].split())
    assert said not in " ".join(call(*asked, "dp_shard=8", *options)[1].split())


def test_fit_exact_finds_what_fits(call: Call) -> None:
    status, out, err = call("fit", "tiny.yaml", "seq_len=1024", "--memory", "858MiB", "--exact", "--json")
    document = json.loads(out)
    assert status == 0
    largest = document["largest"]
    assert document["tried"][str(largest)] is True
    assert document["tried"][str(largest + 1)] is False
    assert f"micro_batch_size {largest}: fits" in err
    status, out, _ = call("fit", "tiny.yaml", "seq_len=1024", "--memory", "858MiB", "--exact")
    assert f"the largest micro_batch_size is {largest}" in out
    assert f"{largest + 1} runs out of memory in" in out


def test_fit_exact_exits_3_when_nothing_fits(call: Call) -> None:
    status, out, _ = call("fit", "tiny.yaml", "--memory", "759MiB", "--exact")
    assert status == 3
    assert "no micro_batch_size fits" in out


def test_help_has_examples(call: Call) -> None:
    for command, words in (("simulate", "--allocator"), ("validate", "--tolerance"), ("fit", "--exact")):
        status, out, _ = call(command, "--help")
        assert status == 0
        assert words in out
        assert f"harness {command} " in out
