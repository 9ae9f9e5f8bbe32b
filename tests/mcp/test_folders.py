"""Which paths a server reads, and what it does not look at: without a server."""

from pathlib import Path
from typing import Any

import pytest

import harness
from harness.errors import InputError
from harness.mcp import folders as folders_file
from harness.mcp import questions as questions_file
from harness.mcp.folders import Folders
from harness.mcp.questions import Questions
from harness.system import recipes_folder
from tests.support.places import ROOT
from tests.support.reported import simulated_run, write_hand_made


def over(folder: Path) -> Questions:
    return Questions(Folders([folder], recipes_folder()))


def test_a_path_is_absolute_or_seen_from_a_folder(tmp_path: Path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / f"{folder.name}.yaml").write_text("model: x\n")
    (one / "to-two.yaml").symlink_to(two / "two.yaml")
    folders = Folders([one, two], recipes_folder())
    for text in ("two.yaml", str(two / "two.yaml"), "../two/two.yaml", "./two.yaml", "to-two.yaml"):
        assert folders.inside(text) == (two / "two.yaml").resolve()
    assert folders.inside("one.yaml", one) == (one / "one.yaml").resolve()
    for text in ("one.yaml", "", ".." * 3000):
        with pytest.raises(InputError, match="is not in the folders"):
            folders.inside(text, two)
    assert [path.name for path in folders.files()] == ["one.yaml", "to-two.yaml", "two.yaml"]
    sibling = tmp_path / "one-more"
    sibling.mkdir()
    (sibling / "x.yaml").write_text("")
    with pytest.raises(InputError, match="is not in the folders"):
        folders.inside("../one-more/x.yaml")


def test_a_path_outside_is_refused_alike_whether_it_exists(tmp_path: Path):
    there = ROOT / "README.md"
    said = []
    for path in (there, f"{there}x"):
        with pytest.raises(InputError, match="is not in the folders") as refused:
            over(tmp_path).report([str(path)])
        said.append(str(refused.value).replace(f"{path}'", "'"))
    assert said[0] == said[1]


def test_without_folders_what_harness_brings_is_all(tmp_path: Path):
    questions = Questions(Folders([], recipes_folder()))
    assert questions.of_the_api(harness.napkin)(recipe="smoke")["answer"].startswith("smoke: fits in the ")
    with pytest.raises(InputError, match="which are: none"):
        questions.report([str(tmp_path)])


def test_what_is_looked_at_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(30):
        (tmp_path / f"snapshot-{number}.json").write_text("")
    assert over(tmp_path).files()["more_than_listed"] is False
    monkeypatch.setattr(questions_file, "MOST_FILES", 10)
    listed = over(tmp_path).files()
    assert (len(listed["snapshots"]), listed["more_than_listed"]) == (10, True)
    monkeypatch.setattr(folders_file, "MOST_ENTRIES", 20)
    assert len(list(Folders([tmp_path], recipes_folder()).files())) == 20
    with pytest.raises(InputError, match="holds more than 20 files"):
        over(tmp_path).report(["."])


def test_a_large_snapshot_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_hand_made(tmp_path / "here")
    monkeypatch.setattr(questions_file, "MOST_SNAPSHOT_BYTES", file.stat().st_size - 1)
    for question in (lambda: over(tmp_path).snapshot("here"), lambda: over(tmp_path).report([str(file)])):
        with pytest.raises(InputError, match="which this server does not read"):
            question()


def test_a_profile_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The model that a profile names is not looked for: anybody may have written it."""
    run = simulated_run(tmp_path / "run")
    text = (run / "profile.json").read_text()
    (run / "profile.json").write_text(text.replace('"model": "', '"model": "/etc/passwd", "_": "', 1))

    def stop(*_: Any) -> Any:
        raise AssertionError("a config was read")

    monkeypatch.setattr("harness.architecture.config_file.read_config", stop)
    monkeypatch.setattr("harness.architecture.model_shape.read_config", stop, raising=False)
    assert "/etc/passwd" in over(tmp_path).report(["run"])["tables_in_markdown"]


def test_tables_are_cut_to_what_a_program_can_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    simulated_run(tmp_path / "run")
    monkeypatch.setattr(questions_file, "LONGEST_ANSWER", 100)
    said = over(tmp_path).report(["run"])
    assert len(said["tables_in_markdown"]) == 100
    assert said["tables_are_cut"] is True
