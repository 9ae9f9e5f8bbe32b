"""The questions in Python: what they take, return, show and refuse; and the examples of docs/python.md."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.errors import InputError
from harness.step_profile.step_profile import StepProfile
from harness.units import in_gib
from tests.support.places import ROOT
from tests.support.reported import HOSTILE

SMALL: dict[str, Any] = {"seq_len": 64, "micro_batch_size": 1}


def same(one: StepProfile, other: StepProfile) -> bool:
    """But for the time it was made at."""
    documents = [json.loads(profile.to_json()) for profile in (one, other)]
    for document in documents:
        document["provenance"] = None
    return documents[0] == documents[1]


def test_a_recipe_is_a_name_a_path_or_a_recipe(tmp_path: Path):
    recipe = harness.load_recipe("smoke", **SMALL)
    by_name = harness.napkin("smoke", **SMALL)
    assert same(by_name, harness.napkin(recipe))
    assert same(by_name, harness.napkin(harness.load_recipe("smoke"), **SMALL))
    assert same(by_name, harness.napkin(ROOT / "recipes/smoke.yaml", **SMALL))
    assert by_name.provenance["recipe_name"] == "smoke"
    assert not same(by_name, harness.napkin("smoke", seq_len=64, micro_batch_size=2))


def test_overrides_are_values_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text.txt").write_text("a few words\n" * 50)
    monkeypatch.chdir(tmp_path)
    recipe = harness.load_recipe(
        "smoke", data=Path("text.txt"), gradient_checkpointing=True, offload=["activations"]
    )
    assert recipe.data == str(tmp_path / "text.txt")
    assert recipe.gradient_checkpointing
    assert recipe.offload == ("activations",)
    assert harness.load_recipe(recipe, gradient_checkpointing=False).offload == ("activations",)


def test_what_follows_the_steps_is_simulated_as_the_command_does():
    few = {"batches": 2, "batch_size": 1}
    found = harness.simulate("smoke", phases="train,eval,save", evaluation=few, **SMALL)
    alone = harness.simulate("smoke", **SMALL)
    assert {"evaluation", "saving"} <= found.phases.keys()
    assert found.memory.peak_allocated_bytes == alone.memory.peak_allocated_bytes
    assert not {"evaluation", "saving"} & alone.phases.keys()
    with pytest.raises(InputError, match=r"phases=train,evil: there is no phase evil\. Did you mean eval\?"):
        harness.simulate("smoke", phases="train,evil")
    with pytest.raises(InputError, match=r"there is no batch_sice\. Did you mean batch_size\?"):
        harness.simulate("smoke", phases="train,eval", evaluation={"batch_sice": 1})
    with pytest.raises(InputError, match="evaluation batches belongs to an evaluation"):
        harness.simulate("smoke", evaluation={"batches": 1})


def test_a_simulation_leaves_a_folder(tmp_path: Path):
    profile = harness.simulate("smoke", out=tmp_path / "here", **SMALL)
    assert harness.load_profile(tmp_path / "here") == profile
    assert harness.load_profile(tmp_path / "here" / "profile.json") == profile
    assert harness.load_snapshot(tmp_path / "here")["device_traces"][0]
    assert harness.load_recipe(tmp_path / "here" / "recipe.yaml") == harness.load_recipe("smoke", **SMALL)
    with pytest.raises(harness.InputError, match="already holds"):
        harness.simulate("smoke", out=tmp_path / "here")


def test_what_fits_is_said_and_printed():
    quick = harness.fit("mistral-7b-qlora", memory="16GiB", quick=True)
    assert not quick.seen
    assert quick.micro_batch_size == quick.as_json()["largest_micro_batch_size"] > 0
    assert str(quick).startswith("mistral-7b-qlora on 16GiB (16.00 GiB): fits by arithmetic")
    assert f"largest seq_len at micro_batch_size 1: {quick.seq_len}" in str(quick)
    small = harness.fit("mistral-7b-qlora", memory="6GiB", quick=True)
    assert small.together
    assert f"It fits with {small.together}." in small._repr_html_()
    with pytest.raises(harness.InputError, match="--margin 2"):
        harness.fit("smoke", quick=True, margin=2)


def test_a_profile_shows_itself(tmp_path: Path):
    profile = harness.napkin("smoke", **SMALL)
    shown = profile._repr_html_()
    assert "<b>smoke on h100</b>" in shown
    for phase in profile.phases:
        assert f">{phase}</td>" in shown
    printed = str(profile).splitlines()
    assert printed[0] == "smoke on h100, napkin"
    assert f"  peak allocated: {in_gib(profile.memory.peak_allocated_bytes)}" in printed
    assert len(printed) < 9
    profile.provenance["recipe_name"] = HOSTILE
    profile.warnings = [HOSTILE] * 100 + ["x" * 10**6]
    profile.phases[HOSTILE] = profile.phases["forward"]
    shown = profile._repr_html_()
    assert "<script" not in shown.lower()
    assert "&lt;" in shown
    assert len(shown) < 50_000


def test_a_report_shows_itself_and_writes_its_page(tmp_path: Path):
    profile = harness.napkin("smoke", **SMALL)
    again = harness.napkin("smoke", seq_len=128, micro_batch_size=1)
    seen = harness.report(profile, again)
    assert [run.name for run in seen.runs] == ["smoke", "smoke"]
    assert seen.path is None
    assert seen._repr_html_().count("Peak allocated") == 2
    assert "| seq\\_len | 64 | 128 |" in seen.markdown
    written = seen.write(tmp_path / "page.html")
    assert written.path == tmp_path / "page.html"
    assert (tmp_path / "page.html").read_text() == seen.html
    assert str(tmp_path) in written._repr_html_()
    profile.provenance["recipe_name"] = HOSTILE
    assert "<script" not in harness.report(profile)._repr_html_().lower()


def test_the_examples_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    text = (ROOT / "docs/python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "call: there is no field seqlen. Did you mean seq_len?" in said
    assert {"my-run", "both.html"} == {path.name for path in tmp_path.iterdir()}
    offered = {name for name in harness.__all__ if not name.startswith("__")}
    assert {name for name in offered if f"`harness.{name}" in text or f"`{name}`" in text} == offered


WRONG: dict[str, Callable[[], object]] = {
    "Did you mean smoke?": lambda: harness.napkin("smok"),
    "no field hardwar. Did you mean hardware?": lambda: harness.napkin("smoke", hardwar="l4"),
    "call: there is no field seqlen. Did you mean seq_len?": lambda: harness.napkin("smoke", seqlen=2),
    "call: seq_len: many is not possible": lambda: harness.napkin("smoke", seq_len="many"),
    "no h1000 in the table. Did you mean": lambda: harness.napkin("smoke", hardware="h1000"),
    "hardware: 3 is no name of a device": lambda: harness.napkin("smoke", hardware=3),
    "write a size such as 16GiB": lambda: harness.napkin("smoke", memory="16"),
    "a recipe is a name, a path or a harness.Recipe, and no int": lambda: harness.napkin(3),
    "with quantization from the call": lambda: harness.napkin("smoke", quantization="nf4"),
    "there is no file": lambda: harness.load_recipe("smoke", data=Path("nothing.txt")),
    "cannot read the profile nothing.json": lambda: harness.load_profile("nothing.json"),
    "cannot read the snapshot nothing.pickle": lambda: harness.load_snapshot("nothing.pickle"),
    "there is nothing to report": lambda: harness.report(),
    "there is no nothing": lambda: harness.report("nothing"),
    "--device tpu: this machine has": lambda: harness.run("smoke", device="tpu"),
    "phases=": lambda: harness.simulate("smoke", phases=["train"]),
    "there is no phase": lambda: harness.simulate("smoke", phases=""),
    "evaluation=": lambda: harness.simulate("smoke", phases="train,eval", evaluation="x"),
    "rank='0'": lambda: harness.simulate("smoke", rank="0"),
    "rank=1.5": lambda: harness.simulate("smoke", rank=1.5, parallel="fsdp", dp_shard=2),
    "margin='5%'": lambda: harness.fit("smoke", margin="5%"),
    "path=None": lambda: harness.load_snapshot(None),
    "path=7": lambda: harness.load_profile(7),
    "about=5": lambda: harness.report(5),
    "seq_len: -5": lambda: harness.simulate(harness.load_recipe("smoke").model_copy(update={"seq_len": -5})),
    "no field gpus. Here it is dp_shard": lambda: harness.fit("smoke", gpus=4, quick=True),
    "no field hardware. It is an argument": lambda: harness.run("smoke", hardware="h100"),
    "no field nosuch": lambda: harness.napkin(harness.load_recipe("smoke").model_copy(update={"nosuch": 3})),
    "seq_len: 1.5": lambda: harness.napkin(harness.load_recipe("smoke").model_copy(update={"seq_len": 1.5})),
    "recipe: missing": lambda: harness.napkin(),
    "no dict": lambda: harness.napkin({"model": "smoke"}),
    "memory=16.5": lambda: harness.napkin("smoke", memory=16.5),
    "Write memory='24GiB' or memory=24 * 2**30": lambda: harness.fit("smoke", memory=24, quick=True),
    "--memory 0B": lambda: harness.napkin("smoke", memory=-1),
    "give the number of tokens": lambda: harness.hardware("smoke", tokens=0),
    "the price of h100 is": lambda: harness.hardware("smoke", prices={"h100": -1.0}),
    "tokens='35M'": lambda: harness.hardware("smoke", tokens="35M"),
    "no field memory. It is an argument": lambda: harness.hardware("smoke", memory="24GiB"),
    "allocator=5": lambda: harness.simulate("smoke", allocator=5),
    "out=5": lambda: harness.run("smoke", out=5),
    "track=5": lambda: harness.run("smoke", track=5),
    "snapshot='no'": lambda: harness.run("smoke", snapshot="no"),
}


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.filterwarnings("error")
def test_a_wrong_argument_is_an_input_error(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(said)):
        WRONG[said]()
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_bytes_is_taken_as_bytes():
    assert harness.napkin("smoke", memory=1000).hardware.memory_bytes == 1000
    assert str(harness.fit("smoke", memory=16 * 2**30, quick=True)).startswith(
        "smoke on 17,179,869,184 B (16.00 GiB): fits"
    )
    assert same(
        harness.napkin("smoke", memory=16 * 2**30, **SMALL), harness.napkin("smoke", memory="16GiB", **SMALL)
    )


def test_the_callers_torch_is_neither_heard_nor_changed():
    import torch

    expected = harness.simulate("smoke", **SMALL).memory
    torch.manual_seed(5)
    numbers = torch.rand(3)
    torch.manual_seed(5)
    assert harness.simulate("smoke", **SMALL).memory == expected
    assert torch.equal(torch.rand(3), numbers)
    anomalies = torch.autograd.set_detect_anomaly(True)
    for state in (torch.no_grad(), torch.inference_mode(), anomalies, torch.device("meta")):
        with state:
            assert harness.simulate("smoke", **SMALL).memory == expected
    assert not torch.is_anomaly_enabled()
    torch.set_default_device("meta")
    try:
        assert harness.simulate("smoke", **SMALL).memory == expected
        assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)
