"""Recipes on disk: every bad file and override is one clear InputError, and every recipe we carry loads."""

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import InputError
from harness.recipe.check import NOT_HERE, recipe_schema
from harness.recipe.fields import Precision
from harness.recipe.file import (
    CardRecipe,
    find_model_config,
    list_card_recipes,
    list_models,
    list_recipes,
    load_recipe,
    recipe_yaml,
)
from harness.recipe.recipe import Recipe
from harness.system import locations
from harness.system.locations import recipes_folder
from harness.system.strict_yaml import MAX_FILE_BYTES, parse_yaml

NUM_RECIPES = 28

FIELD_NAMES = st.sampled_from(list(Recipe.model_fields))
YAML_TOKENS = st.lists(
    FIELD_NAMES
    | st.sampled_from([*"[]{}|>%?#'\"", ": ", "\n", "- ", ", ", "&a ", "*a", "!!int ", "<<"])
    | st.sampled_from(["null", "true", "nan", ".nan", "-1", "1e3", "1_0", "0x1", "12:30", "2024-99-99"]),
    max_size=8,
).map("".join)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(content: str | bytes, name: str = "mine.yaml") -> str:
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return f"./{name}"


def complaint(source: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_recipe(source, overrides)
    text = str(caught.value)
    assert "\n" not in text, "one paragraph"
    assert text.endswith((".", "?")), "whole sentences"
    for of_pydantic in ("type=", "pydantic", "https://", "Input should", "Value error", "validation error"):
        assert of_pydantic not in text
    assert len(text) < 1000
    return text


# --- the recipes we carry -----------------------------------------------------------------------------


def test_the_list_is_every_yaml_file_under_recipes() -> None:
    on_disk = sorted(path.stem for path in recipes_folder().rglob("*.y*ml"))
    by_card = [recipe.name for recipe in list_card_recipes()]
    assert on_disk == sorted([*by_card, *(name for name, _ in list_recipes())])
    assert len(on_disk) - len(by_card) == NUM_RECIPES


@pytest.mark.parametrize("path", sorted(recipes_folder().rglob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_loads_and_holds_only_what_differs_from_the_defaults(path: Path) -> None:
    loaded_name, recipe = load_recipe(path.stem)
    assert loaded_name == path.stem
    text = path.read_text()
    for field in yaml.safe_load(text):
        assert getattr(recipe, field) != Recipe.model_fields[field].default, field
    assert find_model_config(recipe.model) is not None
    assert recipe.data == "synthetic" or Path(recipe.data).is_file()


def test_every_recipe_is_described_and_different() -> None:
    descriptions = [description for _, description in list_recipes()]
    assert all(20 <= len(description) <= 110 for description in descriptions)
    assert len(set(descriptions)) == NUM_RECIPES
    recipes = [load_recipe(name)[1] for name, _ in list_recipes()]
    assert len(set(recipes)) == NUM_RECIPES


@pytest.mark.parametrize("listed", list_card_recipes(), ids=lambda listed: listed.name)
def test_a_card_s_recipe_is_what_its_name_says(listed: CardRecipe) -> None:
    recipe = load_recipe(listed.name)[1]
    method = "full" if recipe.trains_base else "qlora" if recipe.quantized else "lora"
    assert (recipe.model, method) == (listed.model, listed.method)
    assert f"on a card of {listed.card_gb} GB: " in listed.description
    assert listed.description.endswith(f"of {recipe.seq_len:,} tokens")
    assert 40 <= len(listed.description) <= 130


def test_every_size_of_card_has_several() -> None:
    sizes = Counter(listed.card_gb for listed in list_card_recipes())
    assert list(sizes) == [8, 12, 16, 24, 32, 48, 80, 96, 141]
    assert min(sizes.values()) >= 4


def test_the_1b_precision_recipes_differ_in_precision_only() -> None:
    recipes = {p: load_recipe(f"llama-3.2-1b-{p}")[1] for p in get_args(Precision)}
    assert {p: recipe.precision for p, recipe in recipes.items()} == {p: p for p in recipes}
    assert len({recipe.model_copy(update={"precision": "bf16"}) for recipe in recipes.values()}) == 1


def test_the_smoke_text_is_long_enough_to_learn_from() -> None:
    recipe = load_recipe("smoke")[1]
    text = Path(recipe.data).read_text(encoding="ascii")
    assert len(text) >= 20_000
    assert recipe.steps >= 30


# --- finding ------------------------------------------------------------------------------------------


def test_a_recipe_is_found_by_name_by_file_name_and_by_path() -> None:
    expected = load_recipe("smoke")
    assert load_recipe("smoke.yaml") == expected
    assert load_recipe(str(recipes_folder() / "smoke.yaml")) == expected


def test_a_file_in_the_current_folder_wins_only_when_it_is_named_as_a_file() -> None:
    write("model: gpt2-small", "smoke.yaml")
    assert load_recipe("smoke.yaml")[1].model == "gpt2-small"
    assert load_recipe("smoke")[1].model == "tiny-llama-bytes"
    Path("llama-3.1-8b-lora").mkdir()
    assert load_recipe("llama-3.1-8b-lora")[1].adapter == "lora"
    assert load_recipe(write("model: gpt2-small", "without-suffix"))[0] == "without-suffix"
    assert load_recipe("without-suffix")[0] == "without-suffix"


def test_a_model_stands_for_the_recipe_of_defaults() -> None:
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text('{"model_type": "llama"}')
    where = str(Path.cwd() / "theirs")
    for source, name, model in (
        ("qwen2.5-7b", "qwen2.5-7b", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("theirs", "theirs", where),
        ("./theirs/config.json", "theirs", f"{where}/config.json"),
    ):
        assert load_recipe(source, ["adapter=lora"]) == (name, Recipe(model=model, adapter="lora"))
    assert "adapter" in complaint("qwen2.5-7b", "adapter=laura")
    assert load_recipe(write('{"model": "gpt2-small"}', "mine.json"))[1].model == "gpt2-small"
    assert load_recipe(write("model: gpt2-small", "qwen2.5-7b.yaml"))[1].model == "gpt2-small"


@pytest.mark.parametrize(
    ("source", "mentions"),
    [
        ("smok", ["'smok'", "Did you mean smoke?", "harness recipes"]),
        ("llama-3.1-8b-qlorra.yaml", ["Did you mean llama-3.1-8b-qlora?"]),
        ("qwen3-14", ["Did you mean qwen3-14b?", "harness models"]),
        ("model=qwen3-14b", ["name the model itself", ": qwen3-14b."]),
        ("recipes/smok.yaml", ["no recipe file recipes/smok.yaml"]),
        ("zzzzzzzz", ["'zzzzzzzz'", "harness recipes"]),
        ("", ["''"]),
        ("no/such/recipe.yaml", ["no/such/recipe.yaml", "no recipe file"]),
        ("./mime.yaml", ["./mime.yaml", "Did you mean mine.yaml?"]),
        ("x" * 5000, ["xxx..."]),
        ("./" + "x" * 5000, ["xxx..."]),
        ("~nobody/recipe.yaml", ["~nobody/recipe.yaml"]),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_missing_recipe(source: str, mentions: list[str]) -> None:
    write("model: gpt2-small", "mine.yaml")
    text = complaint(source)
    assert all(mention in text for mention in mentions), text


def test_without_a_checkout_it_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations, "PACKAGE", tmp_path / "site-packages" / "harness")
    text = complaint("smoke")
    assert str(tmp_path / "site-packages" / "recipes") in text
    assert str(tmp_path / "recipes") in text
    assert find_model_config("gpt2-small") is None
    with pytest.raises(InputError, match="no folder of recipes"):
        list_models()
    assert load_recipe(write("model: some/checkpoint"))[1].model == "some/checkpoint"

    (tmp_path / "recipes" / "models").mkdir(parents=True)
    (tmp_path / "recipes" / "own.yaml").write_text("# my own\nmodel: gpt2-small\n")
    assert list_recipes() == [("own", "my own")]
    assert load_recipe("own")[0] == "own"


# --- bad files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "mentions"),
    [
        ("", ["empty"]),
        ("# only a comment\n", ["empty"]),
        ("- model\n- data\n", ["a list", "name: value"]),
        ("llama\n", ["a single value"]),
        (b"\x7fELF\x00\x01", ["binary"]),
        (b"model: \xff\xfe\n", ["binary"]),
        ("model: a\nmodel: b\n", ["line 2", "model is given twice"]),
        ("model: [a\n", ["line 2", "YAML"]),
        ("model: a\n\tdata: b\n", ["line 2", "YAML"]),
        ("model: a\n---\nmodel: b\n", ["YAML"]),
        ("a: &a [x]\nmodel: *a\n", ["aliases"]),
        ("model: !!python/object/apply:os.system [id]\n", ["line 1, column 8", "tags"]),
        ("model: !custom x\n", ["tags"]),
        ("model: a\nseq_len: !!int abc\n", ["line 2", "tags"]),
        ("model: a\ncompile: !!bool abc\n", ["line 2", "tags"]),
        ("1: 2\n", ["a key must be a name"]),
        ("{a: 1}: 2\n", ["a key must be a name"]),
        ("[a]: 2\n", ["a key must be a name"]),
        ("<<: {model: a}\n", ["no field <<"]),
        ("model: a\x07b\n", ["not printable"]),
        ("model: " + "[" * 20_000, ["too deeply"]),
        ("model: a\n" + "#" * MAX_FILE_BYTES, ["1,000,009 bytes", "1,000,000"]),
        ("model: [" + "{a: 1}, " * 120_000 + "a]\n", ["more than 10,000 names and values"]),
        ("model: a\n" + "".join(f"k{n}: 1\n" for n in range(90_000)), ["line 5000", "more than 10,000"]),
        (
            "model: a\n" + "".join(f"steps{n}: 1\n" for n in range(3000)),
            ["no field steps0", "And 2995 more fields"],
        ),
        ("seq_len: 512\n", ["field model is missing"]),
        ("model: null\n", ["model: null"]),
        ("model: ''\n", ["model: "]),
        ("model: [a, b]\n", ["model: [a, b]", "text"]),
        ("model: 7\n", ["model: 7", "text"]),
        ("model: {name: a}\n", ["model: ", "text"]),
    ],
    ids=lambda value: value[:25] if isinstance(value, str | bytes) else "",
)
def test_bad_file(content: str | bytes, mentions: list[str]) -> None:
    text = complaint(write(content))
    assert "mine.yaml" in text
    assert all(mention in text for mention in mentions), text


def test_a_folder_where_a_file_belongs() -> None:
    Path("folder.yaml").mkdir()
    assert "is a folder without a config.json" in complaint("folder.yaml")


def test_what_is_not_a_regular_file_is_not_read() -> None:
    os.mkfifo("pipe.yaml")
    assert "not a regular file" in complaint("pipe.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file() -> None:
    os.chmod(write("model: a"), 0)
    assert "Permission denied" in complaint("mine.yaml")


def test_dangling_link() -> None:
    os.symlink("nowhere", "link.yaml")
    assert "link.yaml" in complaint("./link.yaml")


def test_transformers_trains_neither_mxfp4_nor_nvfp4() -> None:
    """What `quantization: mxfp4` is told."""
    from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

    assert not Mxfp4HfQuantizer(None).is_trainable
    nvfp4 = pytest.importorskip("transformers.quantizers.quantizer_nvfp4")  # not in the oldest
    assert not nvfp4.NVFP4HfQuantizer(None).is_trainable


@pytest.mark.parametrize(
    ("line", "mentions"),
    [
        ("quantization: mxfp4", ["does not train", "trains as 16-bit weights", "write quantization: none"]),
        ("quantization: nvfp4", ["does not train", "write quantization: none"]),
        ("quantization: mxfp8", ["mxfp8 is a format of floats", "which harness does not have"]),
        ("quantization: GPTQ", ["GPTQ is another library's format"]),
        ("optimizer: adam", ["adam is another optimizer"]),
        ("adapter: dora", ["write adapter: lora with use_dora: true"]),
        ("adapter: vera", ["write adapter: peft with peft: {peft_type: VERA}"]),
        ("adapter: qlora", ["write adapter: lora with quantization: nf4"]),
        ("attention: flex", ["PyTorch's FlexAttention", "write attention: flex_attention"]),
        ("attention: xformers", ["another implementation"]),
        ("attention: flash", ["write attention: flash_attention_2"]),
        ("optimizer: adamw_torch", ["write optimizer: adamw."]),
        ("optimizer: paged_adamw_32bit", ["write optimizer: paged_adamw."]),
        ("precision: float16", ["write precision: fp16"]),
        ("parallel: zero3", ["write parallel: fsdp"]),
        ("loss: liger", ["write loss: fused_linear."]),
        ("offload: cpu", ["write offload: activations, or another of them."]),
        ("bs: 4", ["Here it is micro_batch_size: "]),
        ("grad_accum: 4", ["Here it is gradient_accumulation_steps: "]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_value_known_from_elsewhere_is_no_misspelling(line: str, mentions: list[str]) -> None:
    text = complaint(write(f"model: gpt2-small\n{line}\n"))
    assert all(mention in text for mention in mentions)
    assert "Did you mean" not in text


def test_a_card_is_no_field_and_the_message_says_where_it_goes() -> None:
    good = write("model: gpt2-small\n", "good.yaml")
    assert "hardware=NAME" in complaint(good, "card=h100")
    assert "hardware=h100" in complaint(good, "gpu=h100")


def test_a_task_without_the_loss_of_sft_is_told_so() -> None:
    text = complaint(write("model: gpt2-small\ntask: dpo\nloss: fused_linear\n"))
    assert text.endswith("the other tasks have a loss of their own; set loss: standard.")


def test_every_value_that_is_known_from_elsewhere_is_none_of_ours() -> None:
    for name, values in NOT_HERE.items():
        assert name in Recipe.model_fields
        schema = recipe_schema()["properties"][name]
        assert not set(values) & set(schema.get("enum") or schema["items"]["enum"]), name


@pytest.mark.parametrize(
    ("line", "mentions"),
    [
        ("seqlen: 512", ["no field seqlen", "Did you mean seq_len?"]),
        ("Lora_Rank: 8", ["no field Lora_Rank", "Did you mean lora_rank?"]),
        ("qqqq: 1", ["no field qqqq", "seq_len", "micro_batch_size"]),
        ("seq_len: 128k", ["seq_len: 128k", "Did you mean 131072?"]),
        ("seq_len: -5", ["seq_len: -5", "a whole number of at least 2"]),
        ("seq_len: long", ["seq_len: long", "a whole number"]),
        ("seq_len: 2.5", ["seq_len: 2.5", "a whole number"]),
        ("seq_len: true", ["seq_len: true", "switches", "a whole number"]),
        ("seq_len: null", ["seq_len: null", "a whole number"]),
        ("seq_len: " + "9" * 5000, ["seq_len: 999", "...", "a whole number"]),
        ("seq_len: 1", ["seq_len: 1", "of at least 2"]),
        ("micro_batch_size: 0", ["micro_batch_size: 0", "greater than 0"]),
        ("micro_batch_size: 2147483648", ["greater than 0 and below 2,147,483,648"]),
        ("seed: -1", ["seed: -1", "of at least 0"]),
        ("weight_decay: -0.1", ["weight_decay: -0.1", "a number of at least 0"]),
        ("max_grad_norm: false", ["true and false belong to switches"]),
        ("packing: 1", ["packing: 1", "true or false"]),
        ("learning_rate: nan", ["learning_rate: nan", "a number greater than 0"]),
        ("learning_rate: .nan", ["learning_rate: nan", "a number greater than 0"]),
        ("learning_rate: -.inf", ["learning_rate: -inf", "a number greater than 0"]),
        ("max_grad_norm: none", ["max_grad_norm: none", "a number greater than 0 or null"]),
        ("lora_dropout: 1", ["lora_dropout: 1", "of at least 0 and below 1"]),
        ("lora_dropout: .nan", ["lora_dropout: nan", "of at least 0 and below 1"]),
        ("model_name: gpt2-small", ["no field model_name"]),
        ("compile: yes", ["compile: yes", "true or false"]),
        ("compile: 1", ["compile: 1", "true or false"]),
        ("precision: bf-16", ["precision: bf-16", "fp32, bf16, fp16", "Did you mean bf16?"]),
        ("optimizer: adam_w", ["optimizer: adam_w", "Did you mean adamw?"]),
        ("quantization: 4", ["quantization: 4", "none, nf4, fp4, int8"]),
        ("offload: [activation]", ["offload: [activation]", "Did you mean activations?"]),
        ("offload: {a: 1}", ["offload: ", "a list of any of activations, checkpoints, optimizer"]),
        ("offload: [optimizer, optimizer]", ["listed twice"]),
        ("lora_targets: 'q_proj,q_proj'", ["listed twice"]),
        ("lora_targets: 3", ["lora_targets: 3", "all-linear or a list of names"]),
        ("lora_targets: ['']", ["lora_targets: ", "all-linear or a list of names"]),
        ("quantization: nf4", ["quantization: nf4 with adapter: none", "set adapter: lora"]),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_bad_value_in_a_file_and_on_the_command_line(line: str, mentions: list[str]) -> None:
    text = complaint(write(f"model: gpt2-small\n{line}\n"))
    assert "mine.yaml: " in text
    assert all(mention in text for mention in mentions), text

    good = write("model: gpt2-small\n", "good.yaml")
    text = complaint(good, line.replace(": ", "=", 1))
    assert "command line" in text
    assert all(mention in text for mention in mentions), text


def test_every_wrong_field_is_named_at_once() -> None:
    text = complaint(write("seq_len: -1\nsteps: 0\nseqlen: 3\n"), "compile=1")
    in_the_file = ("mine.yaml: seq_len: -1", "mine.yaml: steps: 0", "no field seqlen", "model is missing")
    assert all(mention in text for mention in (*in_the_file, "command line: compile: 1")), text


def test_many_wrong_fields_are_cut_short() -> None:
    text = complaint(write("".join(f"model{i}: 1\n" for i in range(9))))
    assert "no field model3" in text
    assert "no field model4" not in text
    assert "And 5 more fields are wrong." in text  # model itself is missing too: ten in all


@given(content=st.one_of(st.binary(max_size=60), st.text(max_size=60), YAML_TOKENS))
def test_any_file_is_a_recipe_or_an_input_error(tmp_path_factory: Any, content: str | bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))
    with contextlib.suppress(InputError):
        load_recipe(str(path))


@given(st.lists(st.text(max_size=30) | st.builds("{}={}".format, FIELD_NAMES, YAML_TOKENS), max_size=3))
def test_any_override_is_accepted_or_an_input_error(overrides: list[str]) -> None:
    with contextlib.suppress(InputError):
        load_recipe("smoke", overrides)


# --- overrides ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("learning_rate=3e-4", "learning_rate", 3e-4),
        ("learning_rate=1E-5", "learning_rate", 1e-5),
        ("seq_len=0512", "seq_len", 512),
        ("seq_len=4_096", "seq_len", 4096),
        ("seq_len='4096'", "seq_len", 4096),
        ("seq_len=1e3", "seq_len", 1000),
        (" seq_len = 64", "seq_len", 64),
        ("max_grad_norm=null", "max_grad_norm", None),
        ("max_grad_norm=1", "max_grad_norm", 1.0),
        ("compile=true", "compile", True),
        ("offload=[activations]", "offload", ("activations",)),
        ("offload=activations,optimizer", "offload", ("activations", "optimizer")),
        ("offload=[]", "offload", ()),
        ("lora_targets=q_proj,v_proj", "lora_targets", ("q_proj", "v_proj")),
        ("lora_targets=[q_proj, v_proj]", "lora_targets", ("q_proj", "v_proj")),
        ("model=org/name=with=equals", "model", "org/name=with=equals"),
        ("model=2024-01-01", "model", "2024-01-01"),
        ("data=no", "data", "no"),
    ],
)
def test_override(override: str, field: str, value: Any) -> None:
    source = write("model: gpt2-small\nmax_grad_norm: 0.5\n")
    loaded = getattr(load_recipe(source, [override])[1], field)
    assert loaded == value
    assert type(loaded) is type(value)


def test_3e_4_in_a_file_is_a_number() -> None:
    """PyYAML's own loader reads it as text."""
    assert yaml.safe_load("3e-4") == "3e-4"
    assert load_recipe(write("model: a\nlearning_rate: 3e-4\n"))[1].learning_rate == 0.0003


def test_an_override_mends_a_wrong_field() -> None:
    assert load_recipe(write("model: a\nseq_len: -1\n"), ["seq_len=8"])[1].seq_len == 8


@pytest.mark.parametrize(
    ("overrides", "mentions"),
    [
        (["seq_len"], ["'seq_len'", "key=value"]),
        (["=5"], ["'=5'", "key=value"]),
        ([""], ["key=value"]),
        (["seq_len="], ["'seq_len='", "no value"]),
        (["lr=1e-4"], ["no field lr. Here it is learning_rate: give a number"]),
        (["memory=16GiB"], ["no field of a recipe", "--memory 16GiB"]),
        (["seq_len=4", "seq_len=8"], ["seq_len", "twice"]),
        (["seq_len=4", " seq_len=4"], ["seq_len", "twice"]),
        (["offload=[activations"], ["'offload=[activations'", "YAML"]),
        (["model=*x"], ["aliases"]),
        (["model=!!python/name:os.system"], ["tags"]),
        (["model=a\nb: c"], ["YAML"]),
        (["adapter=none", "quantization=nf4"], ["with adapter, quantization from the command line"]),
    ],
    ids=str,
)
def test_bad_override(overrides: list[str], mentions: list[str]) -> None:
    text = complaint("llama-3.1-8b-lora", *overrides)
    assert all(mention in text for mention in mentions), text


# --- paths --------------------------------------------------------------------------------------------


def test_paths_in_a_file_start_at_its_folder_and_paths_in_an_override_here(tmp_path: Path) -> None:
    Path("sub/model").mkdir(parents=True)
    for text_file in ("sub/text.txt", "text.txt"):
        Path(text_file).write_text("x")
    source = write("model: ./model\ndata: text.txt\n", "sub/mine.yaml")
    recipe = load_recipe(source)[1]
    assert recipe.model == str(tmp_path / "sub" / "model")
    assert recipe.data == str(tmp_path / "sub" / "text.txt")
    recipe = load_recipe(source, ["data=text.txt", "model=sub/model"])[1]
    assert recipe.data == str(tmp_path / "text.txt")
    assert recipe.model == str(tmp_path / "sub" / "model")


def test_names_and_ids_stay_as_they_are() -> None:
    recipe = load_recipe(write("model: org/name\ndata: org/dataset\n"))[1]
    assert (recipe.model, recipe.data) == ("org/name", "org/dataset")
    Path("gpt2-small").mkdir()  # a known model's name wins over a folder of that name
    Path("synthetic").mkdir()
    recipe = load_recipe(write("model: gpt2-small\ndata: synthetic\n"))[1]
    assert (recipe.model, recipe.data) == ("gpt2-small", "synthetic")


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("text.txt").write_text("x")
    source = write("model: gpt2-small\ndata: ~/text.txt\n")
    assert load_recipe("~/mine.yaml")[1].data == load_recipe(source)[1].data == str(tmp_path / "text.txt")


@pytest.mark.parametrize("name", ["missing.txt", "deep/er/missing.jsonl"])
def test_missing_text_names_the_file_looked_for(name: str, tmp_path: Path) -> None:
    text = complaint(write(f"model: gpt2-small\ndata: {name}\n"))
    assert "data: " in text
    assert str(tmp_path / name) in text
    assert "synthetic" in text


# --- writing ------------------------------------------------------------------------------------------

ANY_RECIPE = st.builds(
    Recipe,
    model=st.text(min_size=1, max_size=20),
    data=st.sampled_from(("synthetic", "no", "1e3", "007", "null", "true", "ünïcode: #1", "a\nb")),
    lora_targets=st.one_of(st.just("all-linear"), st.lists(st.text(min_size=1), min_size=1, unique=True)),
    learning_rate=st.floats(min_value=1e-12, max_value=1e12),
    max_grad_norm=st.one_of(st.none(), st.floats(min_value=1e-12, max_value=1e3)),
    offload=st.sampled_from(((), ("activations",), ("activations", "optimizer"))),
    gradient_checkpointing=st.booleans(),
    seq_len=st.integers(2, 2**31 - 1),
)


@given(ANY_RECIPE)
def test_a_written_recipe_reads_back_equal(recipe: Recipe) -> None:
    fields = parse_yaml(recipe_yaml(recipe), "test")
    assert list(fields) == list(Recipe.model_fields)
    assert Recipe(**fields) == recipe


@pytest.mark.parametrize("name", [name for name, _ in list_recipes()])
def test_a_resolved_recipe_loads_from_any_folder(name: str) -> None:
    recipe = load_recipe(name)[1]
    assert load_recipe(write(recipe_yaml(recipe)))[1] == recipe


def test_the_schema_serves_an_editor() -> None:
    schema = recipe_schema()
    assert schema["required"] == ["model"]
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == list(Recipe.model_fields)
    assert all(field["description"] for field in schema["properties"].values())
    assert schema["properties"]["quantization"]["enum"] == ["none", "nf4", "fp4", "int8"]


@pytest.mark.parametrize("nothing", ["null", "Null", "NULL", "~", ""])
def test_every_way_to_write_nothing_is_none(tmp_path: Path, nothing: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"# Mine\nmodel: tiny-llama-bytes\nmax_grad_norm: {nothing}\n")
    assert load_recipe(str(path))[1].max_grad_norm is None
