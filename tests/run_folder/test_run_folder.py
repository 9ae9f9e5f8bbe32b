"""What a run leaves: files that can be used again, on this machine and on others."""

import json
import os
from pathlib import Path

import pytest
import torch

from harness.cli.exit_status import OUT_OF_MEMORY
from harness.cli.running.ranks import RunOptions, run_here
from harness.cli.running.run import _status
from harness.errors import InputError
from harness.fit.advice import advise
from harness.hardware.hardware import find_hardware
from harness.measure import Silent, measure
from harness.measure.cpu import CpuObserver
from harness.measure.observer import Unobserved
from harness.recipe.file import load_recipe
from harness.run_folder import RunFolder, collected, profiles_of_ranks, read_profile
from harness.simulate.simulated_run import simulate
from harness.step_profile.step_profile import StepProfile
from harness.training.loop import set_up
from tests.support.tiny import CPU, tiny


def ran(recipe, folder: Path) -> StepProfile:
    return measure(recipe, RunFolder(folder, "tiny", recipe), Silent(), CPU)


# recipe.yaml ----------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """A folder that stands for a checkout: recipes/, with a model and a text."""
    recipes = tmp_path / "checkout" / "recipes"
    (recipes / "models").mkdir(parents=True)
    (recipes / "models" / "m.json").write_text("{}")
    (recipes / "data.txt").write_text("text")
    (recipes / "r.yaml").write_text("model: m\ndata: data.txt\n")
    monkeypatch.setattr("harness.run_folder.run_folder.recipes_folder", lambda: recipes)
    monkeypatch.setattr("harness.system.locations.recipes_folder", lambda: recipes)
    return tmp_path / "checkout"


def written(recipe, folder: Path) -> Path:
    RunFolder(folder, "r", recipe).log({"step": 0})
    return folder / "recipe.yaml"


def test_a_recipe_within_a_checkout_names_no_folder_of_the_machine(checkout, tmp_path):
    recipe = load_recipe(str(checkout / "recipes" / "r.yaml"))[1]
    path = written(recipe, checkout / "profiles" / "runs" / "one")
    assert str(tmp_path) not in path.read_text()
    assert "data: ../../../recipes/data.txt\n" in path.read_text()
    assert load_recipe(str(path))[1] == recipe  # run again, it is the same
    (checkout).rename(tmp_path / "moved")
    moved = tmp_path / "moved" / "profiles" / "runs" / "one" / "recipe.yaml"
    assert load_recipe(str(moved))[1].data == str(tmp_path / "moved" / "recipes" / "data.txt")


def test_outside_a_checkout_paths_stay_whole(checkout, tmp_path):
    recipe = load_recipe(str(checkout / "recipes" / "r.yaml"))[1]
    path = written(recipe, tmp_path / "elsewhere")
    assert f"data: {checkout / 'recipes' / 'data.txt'}\n" in path.read_text()
    assert load_recipe(str(path))[1] == recipe
    (tmp_path / "mine.txt").write_text("text")
    mine = recipe.model_copy(update={"data": str(tmp_path / "mine.txt")})
    assert load_recipe(str(written(mine, checkout / "run")))[1] == mine


def test_names_are_no_paths(checkout):
    recipe = load_recipe(str(checkout / "recipes" / "r.yaml"), ["data=synthetic"])[1]
    text = written(recipe, checkout / "run").read_text()
    assert "model: m\n" in text
    assert "data: synthetic\n" in text


# warnings ----------------------------------------------------------------------------


def test_a_paged_optimizer_on_a_cpu_is_said_not_to_page(tmp_path):
    profile = ran(tiny(warmup_steps=1, steps=1, optimizer="paged_adamw"), tmp_path / "run")
    assert profile.warnings == [
        "optimizer: paged_adamw: bitsandbytes pages only on a GPU; here its state is not paged"
    ]


def test_documents_that_cannot_be_learned_are_counted(tmp_path):
    """A prompt as long as the row leaves nothing of its completion."""
    examples = [{"prompt": "p" * 40, "completion": "c"}, {"text": "a text long enough"}, {"text": ""}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(example) + "\n" for example in examples))
    profile = ran(tiny(warmup_steps=1, steps=1, data=str(data), seq_len=16), tmp_path / "run")
    (warning,) = profile.warnings
    assert warning.startswith(f"data: 2 documents of {data} were left out")


def test_shape_only_tensors_are_no_memory():
    observer = CpuObserver()
    with observer.phase("setup"):
        shapes = torch.empty(2**40, device="meta")
        real = torch.zeros(100)
    assert observer.memory().setup_peak_allocated_bytes == 400
    del shapes, real


def test_batches_on_the_host_are_no_memory_of_a_simulated_gpu():
    """Ids and labels (int64) of both micro batches, once: the host's own are not on the device."""
    recipe = tiny(gradient_accumulation_steps=2, micro_batch_size=4, seq_len=64, packing=True)
    profile, _ = simulate(recipe, find_hardware("t4"))
    ids, mask = 4 * 64 * 8, 4 * 64 * 64
    assert profile.memory.at_peak.inputs_bytes == 2 * (3 * ids + mask)  # ids, labels, positions, bool mask


# out of memory ----------------------------------------------------------------------------


def test_a_model_that_no_host_can_hold_is_out_of_memory_in_setup(tmp_path):
    """Its first table would have 2**48 bytes, more than a process can address."""
    config = json.loads(Path(tiny().model).read_text())
    large = tmp_path / "large.json"
    large.write_text(json.dumps({**config, "vocab_size": 2**30, "hidden_size": 2**16}))
    recipe = tiny().model_copy(update={"model": str(large)})
    folder = RunFolder(tmp_path / "run", "large", recipe)
    profile = measure(recipe, folder, Silent(), CPU, advise=advise)
    assert profile == StepProfile.read(tmp_path / "run" / "profile.json")
    assert not profile.complete
    assert profile.oom is not None
    assert (profile.oom.phase, profile.oom.requested_bytes) == ("setup", 2**48)
    assert any("GiB less" in line for line in profile.oom.advice)
    assert _status(profile, 9) == OUT_OF_MEMORY == 3


def test_a_misspelt_model_hears_the_nearest_name():
    with pytest.raises(InputError, match=r"Did you mean llama-3\.2-1b\?"):
        set_up(tiny().model_copy(update={"model": "llama-3.2-1B"}), CPU, Unobserved())


# ranks ----------------------------------------------------------------------------------


DDP = {"parallel": "ddp", "dp_replicate": 2}


def test_a_folder_of_somebody_s_that_is_called_ranks_stays(tmp_path, monkeypatch):
    """It was removed when the ranks started, whoever's it was."""
    note = tmp_path / "ranks" / "1" / "notes.txt"
    note.parent.mkdir(parents=True)
    note.write_text("mine")
    monkeypatch.setattr("harness.launch.start_ranks", lambda *_: pytest.fail("the ranks were started"))
    asked = RunOptions(tmp_path, None, True, "cpu", 10.0, None)
    with pytest.raises(InputError, match="already holds a ranks"):
        run_here("tiny", tiny(**DDP), asked)
    assert note.read_text() == "mine"
    RunFolder(tmp_path, "tiny", tiny()).log({"step": 0})  # a run of one process has none


def test_of_the_run_that_goes_on_the_ranks_files_alone_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.run_folder.run_folder.last_checkpoint", lambda path: path)
    kept = [tmp_path / "ranks" / name for name in ("0/notes.txt", "old/profile.json", "٣x/profile.json")]
    gone = [tmp_path / "ranks" / name for name in ("0/profile.json", "7/snapshot.pickle")]
    for path in (*kept, *gone):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    RunFolder(tmp_path, "tiny", tiny(**DDP), tmp_path).forget_ranks()
    assert [path.exists() for path in (*kept, *gone)] == [True, True, True, False, False]


def test_of_a_rank_only_its_own_profile_is_read(tmp_path, monkeypatch):
    """What no rank made, a link to somewhere else, and what is no file: not waited for, and not counted."""
    text = ran(tiny(), tmp_path / "one").to_json()
    ranks = tmp_path / "all" / "ranks"
    for name in ("0", "-1", "٣", "1x", "007", "3", "4"):
        (ranks / name).mkdir(parents=True)
    for name in ("0", "-1", "٣", "1x", "007"):
        (ranks / name / "profile.json").write_text(text)
    os.mkfifo(ranks / "3" / "profile.json")
    (ranks / "4" / "profile.json").symlink_to(tmp_path / "one" / "profile.json")
    (ranks / "5").symlink_to(tmp_path / "one")
    assert list(profiles_of_ranks(tmp_path / "all")) == [0]
    monkeypatch.setattr(collected, "MAX_BYTES", len(text) // 2)
    with pytest.raises(InputError, match=r"more than 10,000 ranks or .* Give the folder of one of them"):
        read_profile(tmp_path / "all")


def test_ranks_are_counted_before_one_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(collected, "MOST_RANKS", 10)
    monkeypatch.setattr(StepProfile, "read", lambda _: pytest.fail("one was read"))
    for rank in range(11):
        (tmp_path / "ranks" / str(rank)).mkdir(parents=True)
        (tmp_path / "ranks" / str(rank) / "profile.json").write_text("{}")
    with pytest.raises(InputError, match="more than 10 ranks"):
        profiles_of_ranks(tmp_path)
