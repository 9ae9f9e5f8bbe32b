"""`harness diff`: two profiles, and one recipe in two environments."""

import json
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from harness.allocator.settings import parse_settings
from harness.answers.two_profiles import diff_lines, diff_profiles
from harness.hardware.hardware import find_hardware
from harness.simulate.simulated_run import simulate
from harness.step_profile.step_profile import OutOfMemoryReport, StepProfile
from harness.step_profile.times import PhaseStats
from tests.support.commands import Call, exit_status
from tests.support.places import LLAMA, ROOT
from tests.support.tiny import tiny

H100 = find_hardware("h100")


@pytest.fixture
def call(call: Call, tmp_path: Path) -> Call:
    (tmp_path / "tiny.yaml").write_text(f"# Tiny\nmodel: {LLAMA}\nprecision: bf16\nadapter: lora\n")
    return partial(call, "diff")


def test_the_change_is_the_difference_of_both() -> None:
    short, long = (simulate(tiny(seq_len=tokens), H100)[0] for tokens in (256, 512))
    found = diff_profiles(short, long)
    assert found.recipe == {"seq_len": (256, 512)}
    assert found.versions == {}
    first, second = short.memory.peak_allocated_bytes, long.memory.peak_allocated_bytes
    assert (found.peak.first, found.peak.second) == (first, second)
    categories = {row.name: row.change or 0 for row in found.bytes if row.place == "at peak"}
    assert sum(categories.values()) == found.peak.change
    assert sum(row.change or 0 for row in found.modules) == found.peak.change
    text = "\n".join(diff_lines(found, ("short", "long")))
    assert "recipe: seq_len is 256 and 512" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_change_of_a_step_s_time_is_told_by_kinds_of_kernels() -> None:
    """Without checkpointing the forward products are done once: what is saved is mostly products."""
    wide = {"micro_batch_size": 8, "seq_len": 4096}
    kept, again = (simulate(tiny(gradient_checkpointing=on, **wide), H100)[0] for on in (False, True))
    time = diff_profiles(again, kept).time
    assert time is not None
    assert time.change == (kept.step.time_s.median or 0) - (again.step.time_s.median or 0)
    assert time.change < 0
    for profile, which in ((again, 0), (kept, 1)):
        phases = profile.phases.values()
        whole = sum(seconds for phase in phases for seconds in phase.kernels_s.values())
        assert sum(each[which] for each in time.by_kernel.values()) == pytest.approx(whole)
    first, second = time.by_kernel["product"]
    assert first > second
    text = "\n".join(diff_lines(diff_profiles(again, kept), ("again", "kept")))
    assert "time of a step: " in text
    assert f"  of it {next(iter(time.by_kernel))}".replace("product", "products") in text
    assert f"{(second - first) * 1e3:+,.1f}" in text


def test_a_profile_and_itself() -> None:
    profile = simulate(tiny(), H100)[0]
    found = diff_profiles(profile, profile)
    assert found.time is not None
    assert found.time.change == 0
    assert (found.bytes, found.modules, found.recipe, found.notes) == ([], [], {}, [])
    assert "the same to the byte" in "\n".join(diff_lines(found, ("a", "b")))


def test_a_step_as_long_with_more_rows_is_faster() -> None:
    """A step that waits for the host takes as long with twice the rows."""
    profile = simulate(tiny(), H100)[0]
    twice = profile.model_copy(deep=True)
    assert profile.step.tokens_per_s
    twice.step.tokens_per_s = 2 * profile.step.tokens_per_s
    assert "tokens/s: +100.0%" in "\n".join(diff_lines(diff_profiles(profile, twice), ("a", "b")))


def test_of_the_allocator_s_settings_those_that_differ_are_named() -> None:
    ours, theirs = (
        simulate(tiny(), H100, parse_settings("roundup_power2_divisions:4", release))[0]
        for release in ("2.11.0", "2.13.0")
    )
    assert diff_profiles(ours, theirs).notes == [
        "allocator: free_block_order is 'address' and 'segment_counter'"
    ]


def test_a_small_change_is_not_rounded_away() -> None:
    profile = simulate(tiny(), H100)[0]
    peak = profile.memory.peak_allocated_bytes or 0
    memory = profile.memory.model_copy(update={"peak_allocated_bytes": round(peak * 0.9999)})
    found = diff_profiles(profile, profile.model_copy(update={"memory": memory}))
    assert any(line.endswith("(-0.010%)") for line in diff_lines(found, ("a", "b")))


def test_what_one_does_not_know_is_no_zero() -> None:
    profile = simulate(tiny(), H100)[0]
    unknown = profile.model_copy(update={"memory": profile.memory.model_copy(update={"process_bytes": None})})
    (row,) = diff_profiles(profile, unknown).bytes
    assert (row.name, row.second, row.change) == ("process", None, None)


def test_run_folders_and_files(call: Call) -> None:
    profile = simulate(tiny(), H100)[0]
    Path("run").mkdir()
    Path("run/profile.json").write_text(profile.to_json())
    profile.provenance["versions"] = profile.provenance["versions"] | {"transformers": "5.0.0"}
    Path("old.json").write_text(profile.to_json())
    status, out, _ = call("old.json", "run")
    assert status == 0
    assert "versions: transformers 5.0.0 and " in out
    status, out, _ = call("old.json", "run", "--json")
    assert json.loads(out)["versions"]["transformers"][0] == "5.0.0"


def saved(profile: StepProfile, name: str) -> str:
    Path(name).write_text(profile.to_json())
    return name


def test_a_peak_that_grew_by_more_than_is_allowed_fails(call: Call) -> None:
    profile = simulate(tiny(), H100)[0]
    peak = profile.memory.peak_allocated_bytes
    assert peak is not None
    before = saved(profile, "before.json")
    profile.memory.peak_allocated_bytes = round(peak * 1.04)
    after = saved(profile, "after.json")
    assert call(before, after, "--fail-above", "5%")[0] == 0
    assert call(after, before, "--fail-above", "0")[0] == 0
    status, out, err = call(before, after, "--fail-above", "3.5%")
    assert status == 5
    assert "peak allocated: " in out
    assert "harness: the peak of training grew from" in err
    assert "(+4.0%). 3.5% is allowed." in err
    assert call(before, after, "--fail-above", "1TiB")[0] == 0
    assert call(before, after, "--fail-above", "0")[0] == 5
    status, out, _ = call(before, after, "--fail-above", "1MiB", "--json")
    assert status == (5 if peak * 0.04 > 2**20 else 0)
    assert json.loads(out)["fail_above"] == "1MiB"
    assert call(before, before, "--fail-above", "0")[0] == 0


def test_an_evaluation_that_grew_fails_too(call: Call) -> None:
    profile = simulate(tiny(), H100)[0]
    profile.phases["evaluation"] = PhaseStats(peak_allocated_bytes=1000)
    before = saved(profile, "before.json")
    profile.phases["evaluation"] = PhaseStats(peak_allocated_bytes=1100)
    status, _, err = call(before, saved(profile, "after.json"), "--fail-above", "5%")
    assert status == 5
    assert "the peak of evaluation grew" in err


def test_running_out_of_memory_is_beyond_any_limit(call: Call) -> None:
    profile = simulate(tiny(), H100)[0]
    before = saved(profile, "before.json")
    profile.oom = OutOfMemoryReport(phase="forward")
    after = saved(profile, "after.json")
    status, _, err = call(before, after, "--fail-above", "1000%")
    assert (status, "the second has no peak: it runs out of memory" in err) == (5, True)
    status, _, err = call(after, before, "--fail-above", "5%")
    assert (status, "no peak to hold the second against" in err) == (2, True)
    for text in ("5", "-5%", "five", "", "1e9%"):
        status, _, err = call(before, after, "--fail-above", text)
        assert (status, "give a percentage as in 5%" in err) == (2, True), text


CHANGED = """
import importlib.abc, importlib.machinery, sys
from importlib.util import spec_from_loader

class Changed(importlib.abc.MetaPathFinder):
    # transformers whose loss keeps one fp32 copy of the logits more for backward
    def find_spec(self, name, path, target=None):
        if name != "transformers.loss.loss_utils":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            plain = module.LOSS_MAPPING["ForCausalLM"]
            def kept(logits, labels, vocab_size, **rest):
                again = logits.float().exp().log()
                return plain(again, labels, vocab_size, **rest)
            module.LOSS_MAPPING["ForCausalLM"] = kept
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Changed())
"""


def test_two_environments(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has a library whose loss keeps one copy more: its size and its place are found."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text(CHANGED)
    changed = tmp_path / "python"
    changed.write_text(f'#!/bin/sh\nPYTHONPATH="{other}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    changed.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT)]))
    # so long that the logits are the peak, and not the workspace of a product
    recipe = ("tiny.yaml", "seq_len=8192", "hardware=l4")
    status, out, err = call(*recipe, "--python", sys.executable, "--python", str(changed), "--json")
    assert status == 0, err
    document = json.loads(out)
    assert document["recipe"] == {}
    peak = next(row for row in document["differences"] if row["name"] == "peak allocated")
    logits = 8192 * 264 * 4
    assert logits <= peak["second"] - peak["first"] <= 2 * logits + 2**20
    sizes = {(action, size) for found in document["divergences"] for action, size, _ in found["only_second"]}
    assert ("alloc", logits) in sizes
    places = [place for found in document["divergences"] for _, _, place in found["only_second"]]
    assert any("sitecustomize" in place for place in places)


def test_the_workflow_of_the_guide(tmp_path: Path, monkeypatch) -> None:
    """Its steps, run one after the other as a runner does, with a recipe and a baseline that grew."""
    text = (ROOT / "docs/ci.md").read_text().split("<!-- workflow -->\n```yaml\n")[1].split("```")[0]
    steps = yaml.safe_load(text)["jobs"]["peak"]["steps"]
    commands = [step["run"] for step in steps if step.get("run", "").startswith("harness ")]
    assert len(commands) == 3
    recipe = tmp_path / "my-recipe.yaml"
    monkeypatch.chdir(tmp_path)

    def run(command: str) -> int:
        return exit_status(*command.split()[1:])

    recipe.write_text(f"# Tiny\nmodel: {LLAMA}\nseq_len: 128\n")
    assert run(commands[0].replace("now", "baseline")) == 0
    assert [run(command) for command in commands] == [0, 0, 0]
    shutil.rmtree(tmp_path / "now")
    recipe.write_text(f"# Tiny\nmodel: {LLAMA}\nseq_len: 512\n")
    assert [run(command) for command in commands] == [0, 5, 0]
