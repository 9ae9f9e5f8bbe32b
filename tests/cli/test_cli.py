"""The commands as a user meets them, without a whole run: help, lists, and every kind of bad input."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.recipe.recipe import Recipe
from harness.system.streams import quiet_libraries
from tests.support.places import LLAMA, MODELS, ROOT


def one_paragraph(text: str) -> bool:
    return text.startswith("harness: ") and text.count("\n") == 1 and "Traceback" not in text


def test_help_names_every_command(call):
    status, out, err = call("--help")
    assert (status, err) == (0, "")
    for command in ("run", "recipes", "schema", "doctor"):
        assert f" {command} " in out


def test_no_command_shows_the_help(call):
    assert call() == call("--help")


def test_help_of_run_shows_examples(call):
    _, out, _ = call("run", "--help")
    assert "harness run smoke" in out
    assert "seq_len=4096" in out
    for option in ("--out", "--json", "--no-snapshot", "--device"):
        assert option in out


def test_recipes_are_listed_a_line_each(call):
    status, out, _ = call("recipes")
    lines = out.splitlines()
    files, by_card = ([*(ROOT / "recipes").glob(names)] for names in ("*.yaml", "cards/*.yaml"))
    assert status == 0
    assert lines.index("") == len(files) > 10
    assert sum(" on a card of " in line for line in lines) == len(by_card) > 30
    assert any(line.split()[0] == "smoke" and len(line.split()) > 3 for line in lines)


def test_shown_recipe_has_every_field_and_can_be_run_again(call, tmp_path):
    status, out, _ = call("recipes", "show", "llama-3.1-8b-qlora", "seq_len=512", "offload=activations")
    assert status == 0
    assert set(yaml.safe_load(out)) == set(Recipe.model_fields)
    (tmp_path / "again.yaml").write_text(out)
    assert call("recipes", "show", "again.yaml")[1] == out
    assert yaml.safe_load(out)["seq_len"] == 512


def test_schema_describes_every_field(call):
    status, out, _ = call("schema")
    schema = json.loads(out)
    assert status == 0
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["additionalProperties"] is False
    assert all("description" in field for name, field in schema["properties"].items() if name != "model")


@pytest.mark.parametrize(
    "words", ["run smoke --hardware h100", "recipes --seq_len 512", "run smoke --verbose"]
)
def test_an_option_of_another_command_is_no_field_of_this_one(call, words):
    status, _, err = call(*words.split())
    assert (status, one_paragraph(err), "Write" in err) == (2, True, False)


@pytest.mark.parametrize(
    "arguments",
    [
        *("run smoke --resume {}", "run smoke --out {}", "run smoke data={}", "napkin smoke model={}"),
        *("napkin {}", "report {}", "sweep smoke seq_len=8,16 --out {}", "snapshot show {}.pickle"),
    ],
)
def test_a_name_that_no_file_can_have_is_one_paragraph(call, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub").mkdir()  # the cache is there, and looked into
    status, out, err = call(*arguments.format("a" * 5000).split())
    assert (status, out) == (2, "")
    assert one_paragraph(err), err


def write_recipe(folder: Path, **fields: object) -> str:
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"model": str(LLAMA), "seq_len": 16, **fields}))
    return "recipe.yaml"


BAD_FILES = {  # more of them: tests/recipe, tests/architecture, tests/data
    "missing recipe": lambda folder: "absent.yaml",
    "recipe is not YAML": lambda folder: (folder / "r.yaml").write_text("model: [") and "r.yaml",
    "config is not JSON": lambda folder: (
        (folder / "c.json").write_text("{") and write_recipe(folder, model="c.json")
    ),
    "config does not build": lambda folder: (
        (folder / "c.json").write_text(json.dumps({**json.loads(LLAMA.read_text()), "hidden_size": 63}))
        and write_recipe(folder, model="c.json")
    ),
    "folder without a config": lambda folder: (folder / "m").mkdir() or write_recipe(folder, model="m"),
    "data is a folder": lambda folder: (folder / "d.txt").mkdir() or write_recipe(folder, data="d.txt"),
    "data without text": lambda folder: (
        (folder / "d.jsonl").write_text('{"body": "x"}\n') and write_recipe(folder, data="d.jsonl")
    ),
    "pretrained without weights": lambda folder: write_recipe(folder, weights="pretrained"),
}


@pytest.mark.parametrize("make", BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files_are_one_paragraph_and_leave_nothing(call, tmp_path, make):
    recipe = make(tmp_path)
    before = set(tmp_path.rglob("*"))
    status, out, err = call("run", recipe, "--json", "--out", "run")
    assert (status, out) == (2, "")
    assert one_paragraph(err), err
    assert set(tmp_path.rglob("*")) == before


def test_out_is_refused_when_it_is_taken_or_impossible(call, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "profile.json").touch()
    (tmp_path / "file").touch()
    for out, said in (("taken", "already holds a profile.json"), ("file", "file"), ("file/below", "file")):
        status, _, err = call("run", "smoke", "--out", out)
        assert status == 2
        assert one_paragraph(err)
        assert out in err
        assert said in err


def test_a_broken_installation_names_the_package():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "sys.argv = ['harness', 'simulate', 'smoke']\n"
        "from harness.cli.app import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, one_paragraph(done.stderr)) == (2, "", True)
    assert "the package torch" in done.stderr


def test_a_sweep_s_processes_begin_with_quiet_libraries(call, monkeypatch):
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    assert call("sweep", "smoke", "micro_batch_size=1,2", "--napkin")[0] == 0
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"


def test_pictures_are_refused_before_the_first_cell(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = call("sweep", "smoke", "micro_batch_size=1,2", "--napkin", "--png")
    assert (status, out, one_paragraph(err)) == (2, "", True)
    assert "a picture needs the package matplotlib" in err


def test_a_terminal_without_our_signs_spells_them():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "harness", "napkin", "smoke"], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert r"264\xb7128" in done.stdout


@pytest.mark.parametrize(("foreign", "command"), [("typer", "--version"), ("mcp", "mcp")])
def test_a_file_of_the_current_folder_is_not_taken_for_a_library(tmp_path, foreign, command):
    (tmp_path / f"{foreign}.py").write_text("raise RuntimeError('the file of this folder was imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", "harness", command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_s_notice_about_kernels_is_kept_out():
    quiet_libraries()
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    assert (logger.isEnabledFor(logging.WARNING), logger.isEnabledFor(logging.ERROR)) == (False, True)


@pytest.mark.parametrize(
    "command",
    [["--help"], ["recipes"], ["recipes", "show", "smoke"], ["schema"], ["napkin", "llama-3.1-70b-qlora"]],
    ids=" ".join,
)
def test_light_commands_import_no_torch(command):
    heavy = {"torch", "transformers", "peft", *(("numpy",) if command[0] != "napkin" else ())}
    code = (
        "import sys\n"
        f"sys.argv = ['harness', *{command!r}]\n"
        "from harness.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n"
        f"    heavy = {heavy!r} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "recipes"], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_stream_that_the_shell_closed_is_no_error(closed: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m harness napkin smoke --json {closed}",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("command", "form"),
    [("fit --quick", ""), ("fit --quick", "--json"), ("hardware", ""), ("shard --gpus 2", "--json")],
)
def test_what_stays_in_16_bit_elsewhere_is_said_before_the_saving_is_believed(call, command, form):
    """2 layers × 4 experts × 3 matrices of 64 × 128 numbers, in 2 bytes a number and in half of one."""
    Path("mix.yaml").write_text(f"model: {MODELS}/mixtral.json\nadapter: lora\nquantization: nf4\n")
    first, *options = command.split()
    status, out, err = call(first, "mix.yaml", *options, *form.split())
    assert status == 0
    said = out + err
    assert said.count("leaves them in 16 bit: 0.4 MiB instead of 96.0 KiB") == 1
    if form:
        json.loads(out)
