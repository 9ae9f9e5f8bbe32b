"""What fits is the last that does; changes are what they say; and the commands answer."""

import json
import shlex

import pytest
from typer.testing import CliRunner

from harness.architecture.model_shape import load_shape
from harness.cli.app import app
from harness.errors import InputError
from harness.fit import compare_hardware, fit, render_choice
from harness.fit.changes import WORTHWHILE, Change, Price, by_arithmetic, combined, suggestions
from harness.fit.search import parts_at_peak
from harness.hardware.hardware import find_hardware, hardware_names, parse_bytes, with_memory
from harness.napkin import estimate, predict
from harness.recipe import Recipe, load_recipe

RTX_4090 = find_hardware("rtx-4090")
GIB = 2**30


def priced(recipe: Recipe):
    return by_arithmetic(RTX_4090, load_shape(recipe.model))


def command(*arguments: str):
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    "name", ["mistral-7b-qlora", "tinyllama-lora", "llama-3.2-1b-bf16", "gpt2-medium-lora"]
)
def test_the_largest_fits_and_the_next_does_not(name):
    recipe = load_recipe(name)[1]
    found = fit(recipe, RTX_4090)
    limit = RTX_4090.memory_bytes * 0.95

    def needs(**fields):
        return estimate(Recipe(**{**recipe.model_dump(), **fields}), RTX_4090).required_bytes

    rows, tokens = found.micro_batch_size, found.seq_len
    assert needs(micro_batch_size=rows) <= limit < needs(micro_batch_size=rows + 1)
    assert needs(seq_len=tokens) <= limit
    if name == "gpt2-medium-lora":
        assert tokens <= 1024, "it has no more positions"
    else:
        assert needs(seq_len=tokens + 64) > limit


def test_mistral_qlora_fits_16_gb_with_room_and_full_fine_tuning_does_not():
    sixteen = with_memory(RTX_4090, parse_bytes("16GB"))
    assert fit(load_recipe("mistral-7b-qlora")[1], sixteen).micro_batch_size >= 1
    full = fit(load_recipe("llama-3.1-8b-full-bf16")[1], sixteen)
    assert (full.micro_batch_size, full.seq_len) == (0, 0)
    assert full.changes


def test_changes_are_real_and_ordered_by_cost():
    recipe = load_recipe("llama-3.1-8b-full-bf16", ["micro_batch_size=2"])[1]
    changes = suggestions(recipe, RTX_4090.memory_bytes, priced(recipe))
    now = estimate(recipe, RTX_4090).required_bytes
    assert len(changes) >= 5
    for change in changes:
        after = estimate(Recipe(**{**recipe.model_dump(), **change.fields}), RTX_4090).required_bytes
        assert after == change.required_bytes == now - change.saved_bytes < now
        assert change.fits == (after <= RTX_4090.memory_bytes)
    order = [(not change.same_result, change.slowdown) for change in changes]
    assert order == sorted(order)
    by_name = {change.overrides: change for change in changes}
    assert by_name["optimizer_in_backward=true"].same_result
    assert any("quantization=nf4" in name and change.fits for name, change in by_name.items())


def test_together_they_fit_as_one_recipe():
    recipe = load_recipe("llama-3.1-8b-full-bf16")[1]
    found = fit(recipe, RTX_4090)
    assert found.together
    changed = load_recipe("llama-3.1-8b-full-bf16", found.together.split())[1]
    assert estimate(changed, RTX_4090).required_bytes <= found.limit_bytes


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("llama-3.1-8b-lora", 12),
        ("llama-3.1-8b-full-bf16", 22),
        ("mistral-7b-qlora", 5),
        ("llama-3.2-1b-fp32", 4),
    ],
)
def test_no_change_is_kept_that_saves_nothing(name, limit):
    """Of single changes all that save half a percent are there and no other; of those made together none can
    be left out."""
    recipe = load_recipe(name)[1]
    needed = estimate(recipe, RTX_4090).required_bytes
    changes = suggestions(recipe, limit * GIB, priced(recipe))
    assert changes
    assert all(change.saved_bytes >= WORTHWHILE * needed > 0 for change in changes)
    assert all(needed - change.required_bytes == change.saved_bytes for change in changes)
    found = combined(recipe, limit * GIB, changes, priced(recipe))
    if found is None:
        return
    together = {name: value for name, value in found.items() if getattr(recipe, name) != value}
    assert estimate(Recipe(**{**recipe.model_dump(), **together}), RTX_4090).required_bytes <= limit * GIB
    for left_out in changes:
        if together.items() >= left_out.fields.items() and together.keys() > left_out.fields.keys():
            fewer = {name: value for name, value in together.items() if name not in left_out.fields}
            without = Recipe(**{**recipe.model_dump(), **fewer})
            assert estimate(without, RTX_4090).required_bytes > limit * GIB, left_out.overrides


def priced_by_hand(**saves: int):
    """1000 bytes, and less for each field that differs from its default; ten tokens a second."""

    def price(recipe: Recipe) -> Price:
        default = Recipe(model="any")
        saved = sum(size for name, size in saves.items() if getattr(recipe, name) != getattr(default, name))
        return Price(1000 - saved, 10.0)

    return price


def test_a_change_that_saves_nothing_or_too_little_is_not_suggested():
    price = priced_by_hand(gradient_checkpointing=200, loss=4, optimizer_impl=5, precision=-100)
    changes = {change.overrides: change for change in suggestions(Recipe(model="any"), 800, price)}
    assert changes.keys() == {"gradient_checkpointing=true", "optimizer_impl=fused"}
    assert changes["gradient_checkpointing=true"].fits
    assert not changes["optimizer_impl=fused"].fits


def test_every_change_that_saves_is_suggested():
    """Where each field that differs from the recipe saves a hundredth."""
    recipe = Recipe(model="any", attention="eager", micro_batch_size=2, seq_len=256, precision="fp32")

    def price(other: Recipe) -> Price:
        differing = sum(getattr(other, name) != getattr(recipe, name) for name in Recipe.model_fields)
        return Price(1000 - 10 * differing, 10.0 - differing)

    found = suggestions(recipe, 985, price)
    alone = [change.overrides for change in found if change.saved_bytes == 10]
    assert alone == [  # as fast as one another: those with the same result first, in the order of the table
        "attention=sdpa",
        "loss=fused_linear",
        "optimizer_impl=fused",
        "gradient_checkpointing=true",
        "mlp_tiles=4",
        "optimizer_in_backward=true",
        "offload=activations",
        "offload=optimizer",
        "offload=parameters",
        "optimizer=adamw_8bit",
        "optimizer=paged_adamw_8bit",
        "precision=bf16",
        "adapter=lora",
        "seq_len=128",
    ]
    more = {change.overrides: change for change in found if change.saved_bytes > 10}
    rows = "micro_batch_size=1 gradient_accumulation_steps=2"
    qlora = "adapter=lora quantization=nf4 double_quant=true"
    assert {name: change.saved_bytes for name, change in more.items()} == {rows: 20, qlora: 30}
    assert (more[rows].slowdown, more[qlora].slowdown) == (10 / 8, 10 / 7)
    assert [change.fits for change in found] == [change.saved_bytes > 10 for change in found]
    assert not any(change.seen for change in found)


def test_of_changes_together_only_those_stay_that_are_needed():
    def change(**fields) -> Change:
        return Change(fields, "", 0, 0, 1.0, False, True)

    steps = [change(optimizer_impl="fused"), change(loss="fused_linear"), change(gradient_checkpointing=True)]
    recipe = Recipe(model="any")
    # the first saves nothing, the second alone is not enough, and the third makes it superfluous
    price = priced_by_hand(optimizer_impl=0, loss=50, gradient_checkpointing=300)
    assert combined(recipe, 700, steps, price) == {"gradient_checkpointing": True}
    assert combined(recipe, 650, steps, price) == {"loss": "fused_linear", "gradient_checkpointing": True}
    assert combined(recipe, 649, steps, price) is None
    assert combined(recipe, 1000, steps, price) == {}
    # the first needs more: with it the second would not be enough, and the third would be asked for as well
    dearer = priced_by_hand(optimizer_impl=-100, loss=200, gradient_checkpointing=150)
    assert combined(recipe, 850, steps, dearer) == {"loss": "fused_linear"}


def test_a_free_change_is_combined_though_it_saves_nothing_by_itself():
    """The optimizer's temporaries are the peak, and without them the logits are."""
    recipe = Recipe(model="any")

    def price(other: Recipe) -> Price:
        logits = 950 if other.loss == "standard" else 700
        step = 1000 if other.optimizer_impl == "foreach" else 600
        saved = 500 * other.gradient_checkpointing
        return Price(max(logits, step) - saved, 10 - other.gradient_checkpointing)

    changes = suggestions(recipe, 800, price)
    assert "loss=fused_linear" not in [change.overrides for change in changes]
    assert combined(recipe, 800, changes, price) == {"loss": "fused_linear", "optimizer_impl": "fused"}


@pytest.mark.parametrize(
    ("model", "impossible"),
    [("gpt-oss-20b", "attention=sdpa"), ("granite-4.0-h-tiny", "loss=fused_linear")],
)
def test_what_a_model_cannot_have_is_not_advised(model, impossible):
    """Neither has transformers an sdpa of gpt-oss, nor Liger a loss of granite's hybrids."""
    pytest.importorskip("liger_kernel")
    recipe = load_recipe("llama-3.1-8b-lora", [f"model={model}", "attention=eager", "seq_len=8192"])[1]
    found = fit(recipe, RTX_4090)
    assert found.changes
    assert impossible not in [change.overrides for change in found.changes]
    assert impossible not in found.together


def test_offloads_made_one_after_the_other_add_up():
    recipe = Recipe(model="any")
    steps = [
        Change({"offload": (name,)}, "", 0, 0, 1.0, False, True) for name in ("activations", "optimizer")
    ]

    def price(recipe: Recipe) -> Price:
        return Price(1000 - 100 * len(recipe.offload), 10.0)

    assert combined(recipe, 800, steps, price) == {"offload": ("activations", "optimizer")}


def test_a_change_that_cheaper_ones_exclude_is_tried_without_them():
    """What steps on the host takes no parameters there."""
    found = fit(load_recipe("llama-3.1-8b-lora", ["model=llama-3.1-405b"])[1], find_hardware("h100"))
    assert any(change.fits for change in found.changes)
    assert found.together == "offload=parameters"


def test_a_change_names_what_differs_as_a_shell_takes_it():
    """Followed word for word, the advice gives what it promises: also beside what is offloaded already."""
    recipe = load_recipe("llama-3.1-8b-lora-offload-activations")[1]
    changes = suggestions(recipe, 12 * GIB, priced(recipe))
    assert any(change.overrides == "offload='[activations,optimizer]'" for change in changes)
    for change in changes:
        followed = load_recipe("llama-3.1-8b-lora-offload-activations", shlex.split(change.overrides))[1]
        assert estimate(followed, RTX_4090).required_bytes == change.required_bytes
        words = dict(word.split("=") for word in shlex.split(change.overrides))
        assert all(getattr(followed, name) != getattr(recipe, name) for name in words)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GiB", 16 * 2**30),
        ("16GB", 16e9),
        ("0.5TiB", 2**39),
        ("1e9", 1e9),
        (" 24 GB ", 24e9),
        ("80000MB", 8e10),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "-1GB", "0", "0.5", "16gib", "GiB", "16", "16GiBs", "nan", "1e999GB", "1_0GB"]
)
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="memory"):
        parse_bytes(text)


@pytest.mark.parametrize("margin", [-0.1, 1.0, float("nan")])
def test_a_margin_outside_0_to_1_is_refused(margin):
    with pytest.raises(InputError, match="margin"):
        fit(load_recipe("tinyllama-lora")[1], RTX_4090, margin=margin)


def test_every_device_is_offered_the_cheapest_first_and_what_cannot_run_last():
    recipe = load_recipe("llama-3.1-8b-lora")[1]
    offers = compare_hardware(recipe, {"h200": 3.5, "l40s": 1.0}, by_arithmetic=True)
    assert len(offers) >= 16
    assert [offer.fits for offer in offers] == sorted((o.fits for o in offers), reverse=True)
    priced = [offer for offer in offers if offer.cost_per_million_tokens is not None]
    assert offers[:2] == priced
    # 3.5 an hour over the tokens of an hour
    h200 = next(offer for offer in offers if offer.name == "h200")
    assert h200.cost_per_million_tokens == pytest.approx(3.5 / (h200.tokens_per_s * 3600 / 1e6))
    t4 = next(offer for offer in offers if offer.name == "t4")
    assert (t4.fits, t4.reason) == (False, "no bf16 units")


def test_of_a_divided_recipe_all_cards_are_paid_for_and_all_tokens_counted():
    """By hand: eight ranks, each with its own 1 x 2,048 tokens a step; eight cards at 3.5 an hour."""
    recipe = load_recipe("llama-3.1-8b-full-bf16", ["parallel=fsdp", "dp_shard=8"])[1]
    offers = {o.name: o for o in compare_hardware(recipe, {"h200": 3.5}, by_arithmetic=True)}
    h200, profile = offers["h200"], predict(recipe, find_hardware("h200"))
    tokens_per_s = 8 * 2048 / profile.step.time_s.median
    assert profile.step.tokens_per_s == pytest.approx(tokens_per_s)
    assert h200.tokens_per_s == pytest.approx(tokens_per_s)
    assert h200.cost_per_million_tokens == pytest.approx(8 * 3.5 / (tokens_per_s * 3600 / 1e6))
    text = render_choice("full", list(offers.values()))
    assert text.startswith("full on 8 of every device")
    (row,) = [line for line in text.splitlines() if line.startswith("  h200 ")]
    assert row.split()[-2] == "28.00"


# The commands -----------------------------------------------------------------------------------


def test_a_quick_fit_says_what_fills_the_memory():
    """Qwen3-14B has 151,936 words: three fp32 tensors of 4,096 tokens' logits (one kept, two gradients)."""
    asked = ("fit", "qwen3-14b", "quantization=nf4", "adapter=lora", "seq_len=4096", "hardware=rtx-4090")
    logits = f"{3 * 4096 * 151_936 * 4 / GIB:.2f} GiB of logits with their copies and gradients"
    text = " ".join(command(*asked, "--quick").stdout.split())
    assert "what fills the memory at micro_batch_size 1: 59.23 GiB of activations" in text
    assert logits in text
    assert logits in json.loads(command(*asked, "--quick", "--json").stdout)["held_back_by"]


@pytest.mark.parametrize("name", ["llama-3.1-8b-full-bf16", "mistral-7b-qlora", "gpt2-medium-lora"])
@pytest.mark.parametrize("loss", ["standard", "fused_linear"])
def test_the_parts_of_a_peak_are_all_of_it(name, loss):
    memory = estimate(load_recipe(name, [f"loss={loss}"])[1], RTX_4090)
    parts = parts_at_peak(memory)
    assert sum(parts.values()) == memory.peak.total_bytes
    assert min(parts.values()) >= 0


def test_a_large_vocabulary_in_fp32_is_advised_against():
    """Qwen3-14B's embeddings and head have 151,936 × 5,120 weights each, which fp32 makes 2 B longer."""
    recipe = load_recipe("llama-3.1-8b-qlora", ["model=qwen3-14b"])[1]
    found = suggestions(recipe, 0, by_arithmetic(RTX_4090, load_shape(recipe.model)))
    advised = next(change for change in found if change.overrides == "upcast_for_kbit=false")
    assert advised.saved_bytes >= 2 * 151_936 * 5_120 * 2
    assert not advised.same_result


def test_a_fit_that_rests_on_unified_memory_says_so():
    """mistral-7b-qlora has paged_adamw_8bit, whose state is not counted."""
    paged = command("fit", "mistral-7b-qlora", "--memory", "16GiB", "--quick")
    assert "On Windows and WSL it does not" in paged.stdout
    document = command("fit", "mistral-7b-qlora", "--memory", "16GiB", "--quick", "--json")
    assert any("WSL" in note for note in json.loads(document.stdout)["notes"])
    assert "WSL" not in command("fit", "tinyllama-lora", "--quick").stdout
    # and where only what is advised is paged
    advised = command("fit", "llama-3.1-8b-full-bf16", "--hardware", "a100-40gb", "--quick")
    assert ("optimizer=paged" in advised.stdout.split("Together")[-1]) <= ("WSL" in advised.stdout)


def test_hardware_names_the_cheapest_and_the_fastest(tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("l4: 0.7\n")
    text = command("hardware", "tinyllama-lora", "--prices", str(prices), "--price", "h100=2.5").stdout
    assert "the cheapest of the 2 with a price: " in text
    assert "the fastest: gb200" in text
    assert "give prices" in command("hardware", "tinyllama-lora").stdout
    # one price is no comparison
    one = command("hardware", "tinyllama-lora", "--price", "h100=2.5").stdout
    assert "the cheapest of" not in one
    assert "give prices of several" in one
    for said in ("1.5k", "1,500"):
        (first, *_) = json.loads(command("hardware", "tinyllama-lora", "--tokens", said, "--json").stdout)
        assert first["hours"] == pytest.approx(1500 / first["tokens_per_s"] / 3600)
    listed = json.loads(command("hardware", "tinyllama-lora", "--price", "h200=3.5", "--json").stdout)
    assert listed[0]["name"] == "h200"
    assert listed[0]["cost_per_million_tokens"] > 0


def test_hardware_without_a_recipe_is_the_table_itself():
    done = command("hardware")
    assert done.exit_code == 0
    listed = [line.split()[0] for line in done.stdout.splitlines()[1:] if line.strip()]
    assert listed[: len(hardware_names())] == hardware_names()
    assert "989.5" in next(line for line in done.stdout.splitlines() if " h200 " in line)


def test_what_lacks_units_is_not_said_to_lack_memory():
    (t4,) = (line for line in command("hardware", "tinyllama-lora").stdout.splitlines() if " t4," in line)
    assert "cannot run it, no bf16 units: t4, " in t4


def test_what_does_not_fit_is_named_once_with_its_memory():
    """Below the table, in lines that a terminal does not fold."""
    lines = command("hardware", "llama-3.1-8b-full-bf16").stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  does not fit, needs "))
    assert not any(" rtx-4090 " in line for line in lines[:first])
    assert " ".join(" ".join(lines[first:]).split()).count(" rtx-4090 (23.6 GiB)") == 1
    assert max(map(len, lines[:first])) <= 80
