"""`harness diff`: two profiles, and one recipe in two environments."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest

from harness.allocator.settings import parse_settings
from harness.answers.two_profiles import diff_lines, diff_profiles
from harness.hardware.hardware import find_hardware
from harness.simulate.simulated_run import simulate
from tests.support.commands import Call
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


def test_a_profile_and_itself() -> None:
    profile = simulate(tiny(), H100)[0]
    found = diff_profiles(profile, profile)
    assert (found.bytes, found.modules, found.recipe, found.notes) == ([], [], {}, [])
    assert "the same to the byte" in "\n".join(diff_lines(found, ("a", "b")))


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one.json",), "there are 1 arguments"),
        (("one.json", "two.json"), "cannot read the profile one.json"),
        (("tiny.yaml", "--python", "python"), "--python is given 1 times"),
        (("tiny.yaml", "--python", "/nowhere/python", "--python", "python"), "No such file"),
        (("tiny.yaml", "--python", "/bin/false", "--python", "python"), "does not run there: nothing"),
        (("a.json", "b.json", "--memory", "16GiB"), "--memory belongs to a recipe"),
    ],
)
def test_bad_input(call: Call, arguments: tuple[str, ...], words: str) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert words in err
