"""A question and its answer: the numbers of the commands, how a wrong one is mended, what is passed on."""

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree

import pytest

from harness.ask.answer import answer_of
from harness.ask.documents import answered_as_json, arithmetic, cards, formula
from harness.ask.form import describe_form
from harness.ask.question import ASKED, read_question
from harness.errors import InputError
from harness.hardware.hardware import hardware_names
from harness.recipe import EFFECTS, Recipe, check_recipe, load_recipe, shown
from harness.simulate.simulated_run import simulate
from harness.units import in_gib
from tests.support.broken_recipes import BROKEN
from tests.support.commands import Call

QUESTIONS = (
    "recipe=llama-3.1-8b-qlora&hardware=rtx-4090",
    "recipe=llama-3.1-8b-lora&hardware=rtx-4090&micro_batch_size=8",
    "recipe=llama-3.1-8b-lora&seq_len=1024&hardware=a100-80gb",
    "recipe=llama-3.2-1b-bf16&attention=eager&hardware=h100",
    "recipe=llama-3.1-8b-full-bf16&seq_len=1024&parallel=fsdp&dp_shard=8&hardware=h100",
    "recipe=llama-3.1-8b-full-bf16&gpus=4&memory=40GiB",
    "recipe=mistral-7b-qlora&offload=[activations]&lora_targets=q_proj,v_proj&hardware=l4",
    "model=qwen2.5-7b&adapter=lora&max_grad_norm=null",
    "recipe=llama-3.1-8b-qlora&model=qwen3-14b&hardware=rtx-4090",
    "recipe=llama-3.1-8b-lora-24gb&hardware=rtx-3090",
)


def rows(answer: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["value"] for row in answer["rows"]}


@pytest.mark.parametrize("text", QUESTIONS)
def test_the_numbers_are_those_of_the_command_that_is_shown(text: str, call: Call) -> None:
    answer = arithmetic(text)
    harness, simulate, *words = shlex.split(answer["command"])
    assert (harness, simulate) == ("harness", "simulate")
    _, napkin, _ = call("napkin", *words, "--json")
    profile = json.loads(napkin)
    at_peak = {name: size for name, size in profile["memory"]["at_peak"].items() if size}
    assert {
        p["name"].replace(" ", "_") + "_bytes": p["bytes"] for p in answer["bar"]["parts"][:-1]
    } == at_peak
    peak, context = profile["memory"]["peak_allocated_bytes"], profile["memory"]["cuda_context_bytes"]
    assert answer["bar"]["taken_bytes"] == peak + context
    assert rows(answer)["tokens/s"] == f"{profile['step']['tokens_per_s']:,.0f}"
    fits = profile["oom"] is None
    assert (answer["fits"] != "no") == fits
    assert fits == (answer["bar"]["taken_bytes"] <= answer["bar"]["memory_bytes"])

    _, found, _ = call("fit", *words, "--quick", "--json")
    quick = json.loads(found)
    largest = [quick["largest_micro_batch_size"], quick["largest_seq_len"]]
    named = [f"{value:,}" if value else "none fits" for value in largest]
    assert [rows(answer)["largest batch"], rows(answer)["largest length"]] == named
    enough = {shlex.join(shlex.split(one["words"])) for one in answer["changes"] if one["fits"]}
    proposed = [
        shlex.join(f"{n}={shown(v)}" for n, v in c["fields"].items()) for c in quick["changes"] if c["fits"]
    ]
    assert enough <= {*proposed, quick["together"]}
    assert bool(enough) == bool(quick["together"])


@pytest.mark.parametrize("text", QUESTIONS)
def test_the_yaml_is_the_recipe(text: str, call: Call, tmp_path: Any) -> None:
    answer = arithmetic(text)
    (tmp_path / "mine.yaml").write_text(answer["yaml"])
    _, printed, _ = call("napkin", "mine.yaml", f"hardware={answer['said']['hardware']}", "--json")
    asked = {name: value for name, value in json.loads(printed)["recipe"].items() if name in ASKED}
    assert asked == {name: answer["said"][name] for name in ASKED}


def test_a_model_without_a_recipe_of_ours_has_a_command_that_can_be_copied_and_its_own_name() -> None:
    answer = arithmetic("recipe=llama-3.1-8b-qlora&model=qwen3-14b&hardware=rtx-4090")
    assert answer["name"] == "qwen3-14b"
    assert answer["command"] == "harness simulate llama-3.1-8b-qlora model=qwen3-14b hardware=rtx-4090"


def test_a_recipe_for_a_card_can_be_asked_about_like_any_other() -> None:
    answer = arithmetic("recipe=llama-3.1-8b-lora-24gb&hardware=rtx-3090")
    assert answer["name"] == "llama-3.1-8b-lora-24gb"
    assert answer["command"] == "harness simulate llama-3.1-8b-lora-24gb hardware=rtx-3090"
    assert "llama-3.1-8b-lora-24gb" in {one["name"] for one in describe_form()["recipes"]}
    changed = arithmetic("recipe=llama-3.1-8b-lora&quantization=nf4&optimizer=paged_adamw&hardware=rtx-3090")
    assert changed["name"].startswith("llama-3.1-8b-")  # a recipe of another model is not nearer
    assert "model=" not in changed["command"]


def test_what_was_taken_when_memory_ran_out_is_not_called_what_it_needs() -> None:
    """It is less than the card has, and the step does not fit."""
    question = read_question("recipe=smoke&hardware=l4&memory=540MB&micro_batch_size=64")
    profile, _ = simulate(question.recipe, question.hardware)
    taken, oom = profile.memory.taken_bytes(), profile.oom
    assert taken is not None
    assert oom is not None
    assert taken < question.hardware.memory_bytes
    (row,) = [r for r in answer_of(question, "simulated", profile)["rows"] if r["value"] == in_gib(taken)]
    assert row["name"] == "taken when it ran out"
    assert row["detail"].endswith(f"; {in_gib(oom.requested_bytes)} more were asked for")


def test_a_change_that_makes_it_fit_does() -> None:
    text = QUESTIONS[1]
    enough = [change for change in arithmetic(text)["changes"] if change["fits"]]
    assert enough
    for change in enough:
        said = dict(pair.split("=") for pair in text.split("&")) | change["fields"]
        assert arithmetic(urlencode(said))["fits"] == "yes"


ASKABLE = [fields for fields in BROKEN if not EFFECTS.keys() & fields.keys()]
"""Of what a step's memory and time depend on."""


@pytest.mark.parametrize("fields", ASKABLE, ids=[str(fields) for fields in ASKABLE])
def test_an_impossible_pair_says_why_and_every_fix_mends_it(fields: dict[str, Any]) -> None:
    said = {"model": "llama-3.2-1b", **{name: shown(value) for name, value in fields.items()}}
    wrong = arithmetic(urlencode(said))
    assert " is impossible: " in wrong["error"]
    assert wrong["fixes"]
    for fix in wrong["fixes"]:
        assert "error" not in arithmetic(urlencode(said | fix["fields"])), fix


def test_what_is_impossible_now_is_what_the_recipe_refuses() -> None:
    question = read_question(QUESTIONS[0])
    impossible = arithmetic(QUESTIONS[0])["impossible"]
    assert impossible["adapter"]["none"].startswith("quantization: nf4 with adapter: none is impossible")
    assert set(impossible["offload"]) == {"optimizer", "parameters"}
    for name, value in (("adapter", "none"), ("parallel", "tp"), ("compile", True), ("attention", "eager")):
        try:
            check_recipe({**question.recipe.model_dump(), name: value}, "")
            refused = False
        except InputError:
            refused = True
        assert refused == (shown(value) in impossible.get(name, {}))


def test_a_model_in_the_place_of_a_recipe_is_a_recipe_of_defaults() -> None:
    """As `harness simulate llama-3.2-1b` takes it."""
    named, asked = (arithmetic(f"{field}=llama-3.2-1b&adapter=lora") for field in ("recipe", "model"))
    assert named["fits"]
    assert named == asked
    question = read_question("recipe=qwen3-8b&adapter=lora")
    assert question.recipe == load_recipe("qwen3-8b", ["adapter=lora"])[1]
    assert question.command == "harness simulate qwen3-8b adapter=lora hardware=h100"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("recipe=llama-3.1-8b-qlor", "Did you mean llama-3.1-8b-qlora?"),
        (
            "recipe=Qwen/Qwen3-4B",
            "Another model is named by the field model: leave recipe out",
        ),
        ("recipe=../../etc/passwd", "there is no '../../etc/passwd' among those of harness"),
        ("model=llama-3.2-1b&seq_len=1", "seq_len: 1 is not possible"),
        ("model=llama-3.2-1b&seqlen=8", "a question has no seqlen. Did you mean seq_len?"),
        ("model=llama-3.2-1b&hardware=rtx-409", "Did you mean rtx-4090?"),
        ("model=llama-3.2-1b&memory=16", "write a size such as 16GiB"),
        ("model=llama-3.2-1b&gpus=0", "write numbers of cards"),
        ("model=llama-3.2-1b&gpus=2,4", "give one number"),
        ("model=llama-3.2-1b&eval_batches=4", "belongs to an evaluation"),
        ("model=llama-3.2-1b&after=sing", "after: sing is not possible"),
        ("hardware=h100", "the field model is missing"),
        ("model=llama-3.2-1b&model=llama-3.2-3b", "the question says model twice"),
        ("a", "no name=value"),
        ("model=%ff", "no name=value"),
        ("&&&", "no name=value"),
        ("model=" + "a" * 5000, "5,006 characters"),
        ("&".join(f"a{n}=1" for n in range(200)), "no name=value"),
        ("model=llama-3.2-1b&offload={a:%20%26x%20[*x]}", "offload"),
        ("model=https://example.org/config.json", "nothing is read from a URL"),
        ("model=/dev/zero", "cannot be read"),
        ("model=/etc/passwd", "is not JSON"),
        *((f"model=llama-3.2-1b&{name}=1", f"{name} is no part of a question") for name in EFFECTS),
    ],
)
def test_what_is_no_question_is_refused_with_what_to_write(text: str, says: str) -> None:
    wrong = arithmetic(text)
    assert says in wrong.get("error", wrong.get("unknown"))


def test_a_model_that_arithmetic_does_not_know_is_left_to_a_simulation(tmp_path: Any) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "nobody-knows", "hidden_size": 64}')
    found = arithmetic(urlencode({"model": str(config)}))
    assert "error" not in found
    assert found["unknown"]
    assert found["said"]["model"] == str(config)


def test_a_config_that_a_page_hands_over_can_be_asked_about(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    path = json.loads(answered_as_json("config", _config_of("llama-3.2-1b")))["path"]
    theirs = json.loads(answered_as_json("arithmetic", urlencode({"model": path})))
    ours = arithmetic("model=llama-3.2-1b")
    assert theirs["bar"] == ours["bar"]
    # whoever handed it has it beside them
    (tmp_path / "config.json").write_text(_config_of("llama-3.2-1b"))
    monkeypatch.chdir(tmp_path)
    _, *words = shlex.split(theirs["command"])
    assert words == ["simulate", "config.json", "hardware=h100"]
    assert theirs["yaml"].split() == ["model:", "config.json"]
    by_command = json.loads(call("napkin", *words[1:], "--json")[1])
    assert theirs["rows"][0]["value"] == in_gib(by_command["memory"]["peak_allocated_bytes"])


def test_so_many_tokens_take_the_hours_that_the_command_says(call: Call) -> None:
    answer = arithmetic("recipe=smoke&hardware=l4&tokens=35M")
    (training,) = (row for row in answer["rows"] if row["name"] == "training")
    tokens_per_s = json.loads(call("napkin", "smoke", "hardware=l4", "--json")[1])["step"]["tokens_per_s"]
    assert training["value"] == f"{35e6 / tokens_per_s / 3600:,.1f} hours"
    assert "35,000,000 tokens" in training["detail"]
    assert answer["said"]["tokens"] == "35000000"
    assert "tokens: many: write a number" in arithmetic("recipe=smoke&tokens=many")["error"]


def _config_of(name: str) -> str:
    from harness.recipe.file import find_model_config

    path = find_model_config(name)
    assert path is not None
    return path.read_text()


def test_every_field_that_changes_something_can_be_asked() -> None:
    fields = {field["name"]: field for group in describe_form()["groups"] for field in group["fields"]}
    assert set(Recipe.model_fields) - set(EFFECTS) - {"model"} <= set(fields)
    assert all(field["about"] for field in fields.values())
    assert fields["offload"]["kind"] == "several"
    assert fields["reduce_dtype"]["choices"] == ["null", "fp32", "bf16", "fp16"]
    assert (fields["seq_len"]["least"], fields["micro_batch_size"]["least"]) == (2, 1)


def test_every_card_says_what_the_command_says_of_it(call: Call) -> None:
    found = cards("recipe=mistral-7b-qlora")["cards"]
    assert {card["name"] for card in found} == set(hardware_names())
    assert [card["fits"] for card in found] == sorted((card["fits"] for card in found), reverse=True)
    for card in found[::6]:
        _, printed, _ = call("napkin", "mistral-7b-qlora", f"hardware={card['name']}", "--json")
        if not printed:  # the device has no units for its dtype
            assert (card["needs"], card["fits"], card["reason"]) == ("-", False, "no bf16 units")
            continue
        memory = json.loads(printed)["memory"]
        assert card["needs"] == in_gib(memory["peak_allocated_bytes"] + memory["cuda_context_bytes"])
        assert card["fits"] == (json.loads(printed)["oom"] is None)
    assert "error" in cards("recipe=nothing")


def test_a_formula_at_hand_gives_the_simulated_bytes(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path))  # other tests simulate this recipe too
    text = "recipe=smoke&seq_len=128&hardware=l4"
    assert formula(text) == {}  # nobody has simulated it yet
    call("fit", "smoke", "seq_len=128", "hardware=l4", "--exact")
    found = formula(text)["answer"]
    _, printed, _ = call("simulate", "smoke", "seq_len=128", "hardware=l4", "--json")
    memory = json.loads(printed)["memory"]
    assert found["source"] == "formula"
    assert found["bar"]["taken_bytes"] == memory["process_bytes"]
    assert rows(found)["peak, allocated"] == in_gib(memory["peak_allocated_bytes"])
    assert sum(part["bytes"] for part in found["bar"]["parts"]) == memory["process_bytes"]


@pytest.mark.parametrize("text", QUESTIONS)
def test_what_is_passed_on_says_the_same(text: str) -> None:
    answer = arithmetic(text)
    picture = ElementTree.fromstring(answer["svg"])
    said = " ".join(picture.itertext())
    assert " ".join(answer["verdict"].split()) in " ".join(said.split())
    for row in answer["rows"]:
        assert row["value"] in said
        assert f"| {row['name']} | {row['value']} ({row['detail']}) |" in answer["markdown"]
    assert answer["command"] in answer["markdown"]
    assert answer["badge"].startswith("![")
    assert answer["badge"].count("](https://img.shields.io/badge/") == 1


def test_hostile_text_stays_text_in_a_picture(tmp_path: Any) -> None:
    config = tmp_path / '"><script>alert(1)</script>' / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text(_config_of("llama-3.2-1b"))
    answer = arithmetic(urlencode({"model": str(config)}))
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(answer["svg"]).iter()}
    assert tags == {"svg", "rect", "text"}
