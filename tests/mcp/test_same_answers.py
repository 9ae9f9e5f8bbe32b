"""Every question has one answer, whoever asks: the command line, Python, a program by MCP, and the report."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import harness
from harness.mcp.folders import Folders
from harness.mcp.questions import Questions
from harness.step_profile import explain_oom, verdict
from harness.system import recipes_folder
from tests.support.commands import Call
from tests.support.places import MODELS

GIB = 2**30
SHAPE = {"seq_len": 512, "micro_batch_size": 2}


@dataclass
class Asked:
    """A recipe on a device: its fields, and the memory that the device has."""

    fields: dict[str, Any]
    memory: str | None = None

    def overrides(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.fields.items()]


CASES = {
    "it fits": Asked(SHAPE),
    "memory runs out": Asked(SHAPE, "520MiB"),
    "pairs": Asked({**SHAPE, "task": "reward"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("asked")
    (here / "llama.json").write_text((MODELS / "llama.json").read_text())
    (here / "mine.yaml").write_text("model: llama.json\n")
    return here


def plain(document: Any) -> Any:
    """As JSON has it, without which sizes were tried: who asks later knows some already."""
    found = json.loads(json.dumps(document))
    for searched in found.get("simulated", {}).values() if isinstance(found, dict) else ():
        del searched["tried"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_whoever_asks(case: str, folder: Path, call: Call) -> None:
    about, mine = CASES[case], folder / "mine.yaml"
    tools = {tool.__name__: tool for tool in Questions(Folders([folder], recipes_folder())).tools()}
    given: dict[str, Any] = {"hardware": "l4"} | ({"memory": about.memory} if about.memory else {})
    place = [mine, *about.overrides(), "hardware=l4", *(["--memory", about.memory] if about.memory else [])]
    asked = {"recipe": "mine.yaml", "overrides": about.fields}

    profiles: dict[str, harness.StepProfile] = {}
    for name, question in (("napkin", harness.napkin), ("simulate", harness.simulate)):
        by_python = profiles[name] = question(mine, **given, **about.fields)
        by_command = harness.StepProfile.from_json(call(name, *place, "--json")[1], "stdout")
        by_tool = tools.pop(name)(**asked, **given)
        assert by_command.memory == by_python.memory
        assert by_command.phases == by_python.phases
        for profile in (by_command, by_python):  # whoever asks is at the end of each stack
            for allocation in profile.oom.top if profile.oom else ():
                allocation.stack = []
        assert by_command.oom == by_python.oom
        assert by_tool["profile"]["memory"] == plain(by_python.memory.model_dump(mode="json"))
        assert by_tool["profile"]["step"] == plain(by_python.step.model_dump(mode="json"))
        said = verdict(by_python) if by_python.oom is None else explain_oom(by_python)
        assert by_tool["answer"] == f"mine: {said}"
        in_words = " ".join("".join(call(name, *place)[1:]).split())
        if name == "simulate":
            assert said.partition(" What would help")[0] in in_words
        elif by_python.memory.process_bytes is not None:
            took, there = by_python.memory.process_bytes / GIB, (by_python.hardware.memory_bytes or 0) / GIB
            verb = "DOES NOT FIT" if took > there else "fits"
            assert f"= {took:.2f} of {there:.2f} GiB: {verb}" in in_words
        first = harness.report(by_python)._sections()[0].answer[0].rstrip(".")
        assert first.lower() == verdict(by_python).lower()
    assert (profiles["simulate"].oom is not None) == (case == "memory runs out")

    options: dict[str, dict[str, Any]] = {"fit": {}, "formula": {}, "shard": {"gpus": 2}}
    for name, more in options.items():
        by_python = getattr(harness, name)(mine, **given, **about.fields, **more)
        words = [f"--{option}={value}" for option, value in more.items()]
        by_command = plain(json.loads(call(name, *place, *words, "--json")[1]))
        by_tool = tools.pop(name)(**asked, **given, **more)
        document = plain(by_python.as_json())
        assert by_command == document.get("strategies", document)
        answer = by_tool.pop("answer")
        assert plain(by_tool) == document
        assert answer.split() == call(name, *place, *words)[1].split()

    words = ["--price", "h100=2.5", "--tokens", "35M"]
    by_command = json.loads(call("hardware", mine, *about.overrides(), *words, "--json")[1])
    more = {"prices": {"h100": 2.5}, "tokens": 35_000_000}
    by_python = harness.hardware(mine, **about.fields, **more)
    by_tool = tools.pop("hardware")(**asked, **more)
    answer = by_tool.pop("answer")
    assert plain(by_tool) == plain(by_python.as_json())
    assert plain(by_tool)["offers"] == by_command
    assert answer.split() == call("hardware", mine, *about.overrides(), *words)[1].split()
    h100 = next(offer for offer in by_command if offer["name"] == "h100")
    if h100["fits"]:  # by hand
        assert h100["hours"] == pytest.approx(35e6 / h100["tokens_per_s"] / 3600)
        assert h100["cost"] == pytest.approx(2.5 * h100["hours"])

    run, other = (folder / f"{case} {name}.json" for name in ("one", "two"))
    run.write_text(profiles["simulate"].to_json())
    other.write_text(profiles["napkin"].to_json())
    sentences = harness.report(run)._sections()[0].answer
    (told,) = tools.pop("report")(paths=[run.name])["answer"].values()
    assert [one for one in told if one in sentences] == [one for one in sentences if one in told]
    assert told[0] == sentences[0]
    by_tool = tools.pop("diff")(first=run.name, second=other.name)
    by_command = json.loads(call("diff", run, other, "--json")[1])
    assert {key: plain(by_tool[key]) for key in by_command if key not in ("first", "second")} == {
        key: value for key, value in by_command.items() if key not in ("first", "second")
    }
    # of snapshots tests/mcp/test_mcp.py asks; a new tool has a place here or there
    assert tools.keys() == {"recipes", "files", "snapshot"}


def test_what_a_command_knows_by_name_the_tools_know(folder: Path) -> None:
    """A recipe for a card, and a Hugging Face id whose config is in recipes/models."""
    tools = Questions(Folders([folder], recipes_folder()))
    fields = {"model": "meta-llama/Llama-3.1-8B-Instruct"}
    by_tool = tools.of_the_api(harness.napkin)(recipe="qwen3-0.6b-full-12gb", overrides=fields)
    by_python = harness.napkin("qwen3-0.6b-full-12gb", **fields)
    assert by_tool["profile"]["memory"] == plain(by_python.memory.model_dump(mode="json"))
    assert "qwen3-0.6b-full-12gb" in tools.recipes()["recipes_for_cards"]


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_model_in_the_folders_stands_for_a_recipe_as_on_the_command_line(
    tmp_path: Path, as_folder: bool
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text((MODELS / "llama.json").read_text())
    model = "mine" if as_folder else "mine/config.json"
    napkin = Questions(Folders([tmp_path], recipes_folder())).of_the_api(harness.napkin)
    by_python = harness.napkin(tmp_path / "mine", seq_len=512)
    answer = napkin(recipe=model, overrides={"seq_len": 512})
    assert answer["profile"]["memory"] == plain(by_python.memory.model_dump(mode="json"))
    assert answer["answer"].startswith("mine: ")
