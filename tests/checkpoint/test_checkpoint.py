"""Checkpoints on disk: whole or not at all, believed only if every byte is as it was written."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoint.checkpoint import NotFiniteWeights, read, restore, save
from harness.checkpoint.same_recipe import MAY_CHANGE
from harness.checkpoint.tree import put_together, take_apart
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.run_folder import RunFolder, checkpoint_files
from harness.run_folder.checkpoint_files import checkpoints, verify, write_checkpoint
from tests.support.tiny import CPU, built, same_bits, step, tiny, weights

FULL = tiny(optimizer="adamw_8bit")
SCALED = tiny(precision="fp16-mixed")
LORA = tiny(adapter="lora", precision="bf16")


def saved(recipe: Recipe, folder: Path) -> Path:
    training, batches = built(recipe)
    return save(folder, recipe, training, batches, [float(step(training, batches))], CPU)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    return saved(FULL, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory) -> Path:
    return saved(SCALED, tmp_path_factory.mktemp("scaled"))


@pytest.fixture(scope="module")
def lora(tmp_path_factory) -> Path:
    return saved(LORA, tmp_path_factory.mktemp("lora"))


# Whole or not at all ----------------------------------------------------------------------------


def some_files(folder: Path) -> None:
    (folder / "a").write_bytes(b"1234")
    (folder / "b").write_text("b")


def test_only_the_last_two_are_kept(tmp_path):
    for steps in (2, 4, 10, 6):  # 6: of a run that was resumed from 4
        write_checkpoint(tmp_path, steps, some_files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-6"]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-6", "step-10"]


def test_one_of_the_same_step_is_replaced(tmp_path):
    write_checkpoint(tmp_path, 2, some_files)
    path = write_checkpoint(tmp_path, 2, lambda folder: (folder / "c").write_text("new") and None)
    assert sorted(file.name for file in path.iterdir()) == ["c", "manifest.json"]


@pytest.mark.parametrize("moment", ["files", "fsync", "rename"])
def test_one_that_fails_leaves_the_earlier_one_and_nothing_else(moment, tmp_path, monkeypatch):
    first = write_checkpoint(tmp_path, 2, some_files)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    write = fail if moment == "files" else some_files
    if moment != "files":
        monkeypatch.setattr(os, moment, fail)
    with pytest.raises(InputError, match=r"cannot write the checkpoint .*step-4: No space left on device"):
        write_checkpoint(tmp_path, 4, write)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == [first]
    verify(first)


def test_what_a_killed_run_left_half_written_is_no_checkpoint_and_goes_away(tmp_path):
    partial = tmp_path / ".step-2.0123456789abcdef.partial"
    partial.mkdir()
    some_files(partial)
    assert checkpoints(tmp_path) == []
    write_checkpoint(tmp_path, 4, some_files)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_weights_from_which_nothing_can_go_on_are_not_written(tmp_path):
    training, batches = built(FULL)
    name, weight = next(iter(training.model.named_parameters()))
    with torch.no_grad():
        weight.view(-1)[5] = torch.inf
    with pytest.raises(NotFiniteWeights) as caught:
        save(tmp_path, FULL, training, batches, [1.0], CPU)
    assert caught.value.names == [name]
    assert list(tmp_path.iterdir()) == []


# Believed only if whole ----------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "recipe.yaml"])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink, link], ids=lambda damage: damage.__name__)
def test_a_damaged_file_is_named(name, damage, full, tmp_path):
    path = Path(shutil.copytree(full, tmp_path / "step-1"))
    damage(path / name)
    with pytest.raises(InputError) as caught:
        read(path, FULL)
    assert (str(path / "elsewhere") if damage is link else str(path / name)) in str(caught.value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not whole"),
        (b'{"format": 1, "files": ', "is not whole"),
        (b"[" * 100_000, "is not whole"),
        (b'{"format": 2, "files": {}}', "is not of format 1"),
        (b"[]", "is not of format 1"),
        (b'{"format": 1}', "has no list of files"),
        (b'{"format": 1, "files": {"a": 3}}', "has no list of files"),
        (b'{"format": 1, "files": {}}', "is not in the manifest"),
        (b'{"format": 1, "files": {"../../x": {"bytes": 1}}}', "is missing"),
    ],
)
def test_a_damaged_manifest_is_refused(content, why, full, tmp_path):
    path = Path(shutil.copytree(full, tmp_path / "step-1"))
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(InputError, match=why):
        read(path, FULL)


def test_a_file_that_nobody_wrote_is_refused(full, tmp_path):
    path = Path(shutil.copytree(full, tmp_path / "step-1"))
    (path / "extra.py").write_text("print()")
    with pytest.raises(InputError, match=r"extra\.py is not in the manifest"):
        read(path, FULL)


def rewritten(checkpoint: Path, folder: Path, change: Any) -> Path:
    """A copy whose state.json was changed by somebody who could compute SHA-256 too."""
    path = Path(shutil.copytree(checkpoint, folder / "step-1"))
    document = json.loads((path / "state.json").read_text())
    change(document)
    (path / "state.json").write_text(json.dumps(document))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = checkpoint_files._size_and_hash(path / "state.json")
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.clear(),
        lambda d: d.update(steps_done="many"),
        lambda d: d.update(losses=None),
        lambda d: d.update(recipe=[]),
        lambda d: d.update(state={"pickle": "x"}),
        lambda d: d.update(state=[]),
        lambda d: d.update(steps_done=0, losses=[]),  # of another step than its name says
        lambda d: d["data"].update(rows_drawn=-1),
        lambda d: d["state"]["dict"].pop(),
    ],
)
def test_a_forged_state_is_an_input_error_too(change, full, tmp_path):
    path = rewritten(full, tmp_path, change)
    training, batches = built(FULL)
    with pytest.raises(InputError, match=re.escape(str(path / "state.json"))):
        restore(read(path, FULL), FULL, training, batches, CPU)


def changed_at(*path: Any, value: Any) -> Any:
    """A change of the value at a path of keys in the tree that a checkpoint's state is."""

    def change(document: dict[str, Any]) -> None:
        [(kind, tree)] = document["state"].items()
        for key in path[:-1]:
            [(kind, tree)] = (dict(tree)[key] if kind == "dict" else tree[key]).items()
        tree[[name for name, _ in tree].index(path[-1])] = [path[-1], value]

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (changed_at("optimizer", "param_groups", 0, "lr", value="1"), "other settings"),
        (changed_at("optimizer", "param_groups", 0, "foreach", value=3), "other settings"),
        (changed_at("optimizer", "state", 0, "exp_avg", value=None), "keeps other state"),
        (
            changed_at("optimizer", "state", 0, value={"dict": [["step", {"tensor": "state.random.cpu"}]]}),
            "keeps other",
        ),
        (changed_at("scaler", "scale", value="nan"), "other settings"),
        (changed_at("scaler", "scale", value={"float": "inf"}), "impossible"),
        (changed_at("scaler", "growth_factor", value=0.0), "other settings"),
        (changed_at("scaler", "_growth_tracker", value=-1), "impossible"),
        (changed_at("random", "python", value=[]), "bare list"),
    ],
)
def test_values_that_the_next_step_would_fail_on(change, what, scaled, tmp_path):
    path = rewritten(scaled, tmp_path, change)
    training, batches = built(SCALED)
    with pytest.raises(InputError, match=what):
        restore(read(path, SCALED), SCALED, training, batches, CPU)


# The same recipe ----------------------------------------------------------------------------


OTHER: dict[str, Any] = {
    "learning_rate": 0.5,
    "seed": 3,
    "micro_batch_size": 1,
    "gradient_checkpointing": True,
    "optimizer": "adamw",
    "weights": "pretrained",
    "packing": True,
}


@pytest.mark.parametrize("field", OTHER)
def test_a_field_that_matters_is_named(field, full):
    with pytest.raises(InputError, match=f"step-1: {field}: "):
        read(full, FULL.model_copy(update={field: OTHER[field]}))


def test_fields_that_do_not_matter_may_change(full):
    other = {"steps": 77, "warmup_steps": 0, "checkpoint_every": 9, "on_nan": "continue"}
    assert set(other) == set(MAY_CHANGE)
    assert read(full, FULL.model_copy(update=other)).state.steps_done == 1


def test_files_are_known_by_what_is_in_them(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("one text. " * 50)
    recipe = tiny(data=str(text))
    path = saved(recipe, tmp_path / "checkpoints")
    elsewhere = Path(shutil.copy(text, tmp_path / "b.txt"))
    read(path, recipe.model_copy(update={"data": str(elsewhere)}))
    model = Path(shutil.copy(recipe.model, tmp_path / "model.json"))
    read(path, recipe.model_copy(update={"model": str(model)}))
    text.write_text("two texts " * 50)
    with pytest.raises(InputError, match="data: the file has changed"):
        read(path, recipe)
    model.write_text(model.read_text().replace("10000", "20000") + " ")
    with pytest.raises(InputError, match=r"model: .*model\.json here"):
        read(path, recipe.model_copy(update={"model": str(model), "data": str(elsewhere)}))


def test_a_file_of_the_home_folder_is_known_by_what_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = tmp_path / "a.txt"
    text.write_text("one text. " * 50)
    recipe = tiny(data="~/a.txt")
    path = saved(recipe, tmp_path / "checkpoints")
    text.write_text("two texts " * 50)
    with pytest.raises(InputError, match="data: the file has changed"):
        read(path, recipe)


def test_a_frozen_base_of_other_values_is_refused(lora, monkeypatch):
    training, batches = built(LORA)
    with torch.no_grad():
        training.model.get_base_model().lm_head.weight.mul_(1.01)  # type: ignore[operator,union-attr]
    with pytest.raises(InputError, match=r"the frozen weights of .* are not those"):
        restore(read(lora, LORA), LORA, training, batches, CPU)


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(InputError, match=r"nowhere: it is no folder\. Give the folder of a run"):
        RunFolder(None, "tiny", FULL, tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"it holds no checkpoint"):
        RunFolder(None, "tiny", FULL, tmp_path)


# What is in it ----------------------------------------------------------------------------


def test_transformers_reads_the_weights(full):
    from transformers import AutoModelForCausalLM

    training, batches = built(FULL)
    step(training, batches)
    theirs = AutoModelForCausalLM.from_pretrained(full)
    assert same_bits(weights(training), {name: p.detach() for name, p in theirs.named_parameters()})


def test_peft_reads_the_adapter(lora):
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    training, batches = built(LORA)
    step(training, batches)
    config = AutoConfig.for_model(**json.loads(Path(LORA.model).read_text()))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_config(config), str(lora), is_trainable=True)
    adapter = {name: p.detach() for name, p in theirs.named_parameters() if p.requires_grad}
    assert same_bits(weights(training, trained_only=True), adapter)


def test_no_file_is_a_pickle(full, lora):
    for path in [*full.iterdir(), *lora.iterdir()]:
        assert path.suffix in (".safetensors", ".json", ".yaml", ".md"), path


# The tree ----------------------------------------------------------------------------


def test_a_tree_comes_back():
    shared = torch.arange(6.0)
    tree = {
        "a": [shared, shared, (1, 2.5, None, True)],
        0: {"a.b": torch.tensor(3), "a": {"b": torch.tensor(4)}},
        "bounds": [float("inf"), float("nan"), 0.1],
        "part": shared[2:4],
        "bf16": torch.ones(2, 3, dtype=torch.bfloat16).t(),
    }
    document, tensors = take_apart(tree)
    back = put_together(json.loads(json.dumps(document)), tensors)
    assert list(back) == ["a", 0, "bounds", "part", "bf16"]
    assert back["a"][0] is back["a"][1]
    assert torch.equal(back["a"][0], shared)
    assert back["a"][2] == (1, 2.5, None, True)
    assert (int(back[0]["a.b"]), int(back[0]["a"]["b"])) == (3, 4)
    assert repr(back["bounds"]) == "[inf, nan, 0.1]"
    assert torch.equal(back["part"], torch.tensor([2.0, 3.0]))
    assert back["bf16"].shape == (3, 2)
    assert len(tensors) == 5


def test_what_has_no_place_in_a_tree_is_refused():
    with pytest.raises(TypeError, match=r"state\.a\.0: a object has no place in a checkpoint"):
        take_apart({"a": [object()]})


def test_a_log_that_cannot_be_opened_says_what_to_do(tmp_path):
    folder = RunFolder(tmp_path / "run", "tiny", FULL)
    folder.log({"step": 0})
    (folder.path / "log.jsonl").unlink()
    (folder.path / "log.jsonl").mkdir()
    with pytest.raises(InputError, match=r"cannot write .*log\.jsonl: Is a directory\. Make room, or give"):
        folder.log({"step": 1})
