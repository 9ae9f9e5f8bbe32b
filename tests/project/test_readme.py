"""README says what is so: its tables, its recipe and its links; its commands are test_docs.py's."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from harness.answers import predicted
from harness.hardware import find_hardware
from harness.recipe import Recipe, check_recipe, list_recipes, load_recipe
from harness.step_profile.step_profile import StepProfile
from pages.cover import COMMAND
from pages.cover import PROFILE as COVER
from pages.links import anchors
from pages.readme import PAGES, PROFILE, ROOT, adopt, committed_parts
from pages.readme import main as main_of_readme
from tests.support.releases import keeps_workspaces

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_part_is_shown_and_a_changed_number_is_found(tmp_path, monkeypatch):
    parts = committed_parts()
    assert all(any(part in page.read_text() for page in PAGES) for part in parts.values())
    wrong = tmp_path / "wrong.md"
    wrong.write_text(PAGES[0].read_text().replace("19.84 GiB", "19.85 GiB"))
    monkeypatch.setattr("pages.readme.PAGES", (wrong,))
    monkeypatch.setattr("pages.readme.ROOT", tmp_path)
    with pytest.raises(SystemExit, match="is not of the results"):
        main_of_readme(["--check"])


def test_the_picture_is_of_the_committed_profile():
    profile = StepProfile.read(COVER)
    _, recipe = load_recipe("llama-3.1-8b-qlora", [])
    assert Recipe.model_validate(profile.recipe) == recipe
    assert (profile.source, profile.hardware.name) == ("simulated", "rtx-4090")
    assert profile.provenance["recipe_name"] == "llama-3.1-8b-qlora"
    assert str(ROOT) not in COVER.read_text()
    first = README[: README.index("## Can it be believed?")]
    assert " ".join(COMMAND.split()) in first
    assert "](docs/pictures/cover.png)" in first


@keeps_workspaces
@pytest.mark.slow
def test_the_cover_says_what_its_command_says():
    """The bytes that the README quotes, against the simulation of today."""
    now = predicted("simulated", load_recipe("llama-3.1-8b-qlora", [])[1], find_hardware("rtx-4090"))
    folded = {"at_peak_by_module": {}}  # layer by layer in the file
    assert now.memory.model_copy(update=folded) == StepProfile.read(COVER).memory.model_copy(update=folded)


def test_the_committed_profile_is_of_the_recipe_as_it_is():
    profile = StepProfile.read(PROFILE)
    _, recipe = load_recipe("smoke", [])
    assert Recipe.model_validate({**profile.recipe, "data": recipe.data}) == recipe
    assert (ROOT / profile.recipe["data"]).is_file()
    assert profile.complete
    assert "/home/" not in PROFILE.read_text()
    assert str(ROOT) not in PROFILE.read_text()


def test_adopting_a_run_names_its_data_from_the_root(tmp_path, monkeypatch):
    profile = StepProfile.read(PROFILE)
    profile.recipe["data"] = str(ROOT / profile.recipe["data"])
    (tmp_path / "profile.json").write_text(profile.to_json())
    monkeypatch.setattr("pages.readme.PROFILE", tmp_path / "adopted.json")
    adopt(tmp_path)
    assert StepProfile.read(tmp_path / "adopted.json") == StepProfile.read(PROFILE)


def test_the_sentence_under_the_table_holds():
    at_peak = StepProfile.read(PROFILE).memory.at_peak
    kept = (at_peak.parameters_bytes or 0) * 2 + (at_peak.optimizer_state_bytes or 0)
    assert round(kept / 2**20) == 13
    assert (at_peak.activations_bytes or 0) > 3 * kept


def test_there_are_commands_and_targets():
    assert len(re.findall(r"^harness ", README, re.MULTILINE)) >= 4
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (\w+)`", README):
        assert f"\n{target}:" in makefile


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize("before", [True, False], ids=["PY=here make", "make PY=here"])
def test_another_interpreter_is_taken_wherever_it_is_written(before):
    given = {"PY": "here"} if before else {}
    arguments = [] if before else ["PY=here"]
    command = ["make", "-n", "check", *arguments]
    environment = {"PATH": os.environ["PATH"], **given}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "here -m ruff check" in done.stdout
    assert ".venv" not in done.stdout  # nothing is set up


def test_the_recipe_is_a_recipe():
    (text,) = [text for language, text in BLOCKS if language == "yaml"]
    assert check_recipe(yaml.safe_load(text), "README").adapter == "lora"


def test_links_and_names_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        assert not anchor or anchor in anchors(ROOT / path), target
    named = re.findall(r"`harness recipes show ([\w.-]+)`", README)
    assert named
    assert set(named) <= {name for name, _ in list_recipes()}


def test_it_is_short():
    assert len(README.splitlines()) <= 130
    assert Path(ROOT / "README.md").stat().st_size < 10_000
