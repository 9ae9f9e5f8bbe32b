"""The lengths of a data set against what fits: by simulation, and by hand."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness.allocator.settings import parse_settings
from harness.data.lengths import example_lengths
from harness.errors import InputError
from harness.fit.lengths import fit_lengths, lengths_lines
from harness.hardware.hardware import find_hardware, with_memory
from harness.simulate.simulated_run import simulate
from tests.support.commands import Call
from tests.support.places import LLAMA
from tests.support.tiny import MODELS, tiny

H100 = find_hardware("h100")
LENGTHS = np.array([3, 5, 5, 8, 13, 21, 2], dtype=np.int64)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A checkpoint folder with a tokenizer of one token a word, and data: 40 texts of 10 words to 400."""
    split = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2}, unk_token="<unk>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=split, eos_token="<eos>", unk_token="<unk>")
    fast.save_pretrained(tmp_path / "checkpoint")
    texts = [{"text": "a " * (10 * n)} for n in range(1, 41)]
    (tmp_path / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    return tmp_path


def test_lengths_are_the_tokenizers(words: Path) -> None:
    found = example_lengths(
        tiny(), str(words / "texts.jsonl"), vocab_size=264, tokenizer=str(words / "checkpoint")
    )
    assert found.tolist() == [10 * n + 1 for n in range(1, 41)]  # and the end of the text
    of_bytes = example_lengths(tiny(), str(words / "texts.jsonl"), vocab_size=264)
    assert of_bytes.tolist() == [20 * n + 1 for n in range(1, 41)]


def test_without_a_tokenizer_it_is_refused(words: Path) -> None:
    data = str(words / "texts.jsonl")
    with pytest.raises(InputError, match=r"a config without a tokenizer.*Give --tokenizer"):
        example_lengths(tiny(), data, vocab_size=32000)
    with pytest.raises(InputError, match="a config without a tokenizer"):
        example_lengths(tiny(), data, vocab_size=None)
    with pytest.raises(InputError, match="gives no tokenizer"):
        example_lengths(tiny(), data, vocab_size=264, tokenizer=str(words))
    (words / "one.txt").write_text("text")
    with pytest.raises(InputError, match="every batch is as long as every other"):
        example_lengths(tiny(), str(words / "one.txt"), vocab_size=264)


def test_what_fits_is_what_a_simulation_sees() -> None:
    recipe = tiny(precision="bf16", micro_batch_size=4, seq_len=2048)
    lengths = np.array([64] * 90 + [640] * 8 + [2000, 3000], dtype=np.int64)
    worst, _ = simulate(recipe.model_copy(update={"micro_batch_size": 2}), H100)
    needed = (worst.memory.peak_reserved_bytes or 0) + (worst.memory.cuda_context_bytes or 0)
    device = with_memory(H100, needed)
    found = fit_lengths(recipe, device, parse_settings(""), lengths)
    assert (found.longest, found.rows_cut, found.tokens_lost) == (2048, 1, 952)
    assert [batch.rows for batch in found.micro_batches] == [1, 2, 4, 8, 16]
    one, two, four = found.micro_batches[:3]
    assert (two.fits_up_to, two.chance_in_an_epoch, two.longer_rows) == (2048, 0, 0)
    assert two.peak_allocated_bytes == worst.memory.peak_allocated_bytes
    assert one.padding_share == pytest.approx(0)
    assert (four.longer_rows, four.chance_in_an_epoch, four.peak_allocated_bytes) == (2, 1, None)
    sized = recipe.model_copy(update={"seq_len": four.fits_up_to})
    assert simulate(sized, device)[0].oom is None
    longer = sized.model_copy(update={"seq_len": four.fits_up_to + 64})
    assert simulate(longer, device)[0].oom is not None
    ways = {way.name: way for way in found.ways}
    cut = ways[f"seq_len={four.fits_up_to}"]
    assert cut.peak_allocated_bytes is not None
    assert (cut.rows_cut, cut.tokens_lost) == (2, 5000 - 2 * four.fits_up_to)
    assert ways["grouped by length"].runs_out == "in batch 1"
    # an epoch is 25 steps of 4 rows, each padded to a mean that is counted by hand
    assert ways["shuffled"].hours_an_epoch is None  # for it does not fit
    mean = -(-cut.tokens_an_epoch // (25 * 4))
    step = simulate(recipe.model_copy(update={"seq_len": int(mean)}), H100)[0].step
    assert cut.hours_an_epoch == pytest.approx(25 * (step.time_s.median or 0) / 3600)
    shown = "\n".join(lengths_lines("tiny", "h100", "texts", recipe, found))
    assert f" {25 * (step.time_s.median or 0):.0f} s" in shown
    assert ways["packing=true"].tokens_an_epoch == -(-found.tokens // 2048) * 2048  # they fill their rows
    text = "\n".join(lengths_lines("tiny", "h100", "texts", recipe, found))
    assert "certain" in text
    assert max(map(len, text.splitlines()[5:-1])) <= 80


def test_what_bitsandbytes_leaves_in_16_bit_is_said(tmp_path: Path) -> None:
    """The experts of a mixture are half of this model: `fit --data` says what `fit` says about them."""
    recipe = tiny(model=str(MODELS / "mixtral.json"), adapter="lora", precision="bf16", quantization="int8")
    warned = simulate(recipe, H100)[0].warnings
    found = fit_lengths(recipe, H100, parse_settings(""), LENGTHS)
    assert found.notes == warned
    text = "\n".join(lengths_lines("tiny", "h100", "texts", recipe, found))
    assert any("bitsandbytes" in warning and f"Note: {warning}" in text for warning in warned)


def test_pairs_are_padded_to_the_longest_of_both_rows() -> None:
    """By hand: batches of two pairs, of which one has a row of 40 tokens, another one of 30."""
    pairs = np.array([10, 40, 30, 6, 20, 20, 5, 9], dtype=np.int64)
    found = fit_lengths(tiny(task="dpo", seq_len=32), H100, parse_settings(""), pairs)
    assert (found.rows, found.longest, found.median) == (4, 32, 25)
    assert (found.rows_cut, found.tokens_lost, found.tokens) == (1, 8, 132)
    two = next(batch for batch in found.micro_batches if batch.rows == 2)
    # the six pairs of {32, 30, 20, 9} have a longest of 32, 32, 32, 30, 30 and 20; two batches of four rows
    padded = 2 * 4 * (3 * 32 + 2 * 30 + 20) / 6
    assert two.padding_share == pytest.approx(1 - 132 / padded)
    worst, _ = simulate(tiny(task="dpo", seq_len=32), H100)
    assert two.peak_allocated_bytes == worst.memory.peak_allocated_bytes
    ways = {way.name: way for way in found.ways}
    assert ways.keys() == {"shuffled", "grouped by length"}  # what is compared is not packed
    assert ways["shuffled"].tokens_an_epoch == pytest.approx(padded)
    recipe = tiny(task="reward", seq_len=32)
    scored = fit_lengths(recipe, H100, parse_settings(""), pairs)
    assert (scored.rows, scored.longest, scored.rows_cut, scored.tokens_lost) == (3, 30, 1, 50)
    text = "\n".join(lengths_lines("tiny", "h100", "texts", recipe, scored))
    assert "1 more are longer than seq_len 32 and left out: 50 tokens lost" in text
    assert "3 pairs of 2 rows; a row of 15 tokens in the mean, 20 in the middle for the longer" in text


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(InputError, match="micro_batch_size: 2, and the data has 1 examples"):
        fit_lengths(tiny(), H100, parse_settings(""), LENGTHS[:1])


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch, words: Path) -> Call:
    (words / "tiny.yaml").write_text(
        f"# Tiny\nmodel: {LLAMA}\nprecision: bf16\nseq_len: 256\ndata: gone.txt\n"
    )
    monkeypatch.chdir(words)
    return partial(call, "fit", "tiny.yaml")


def test_the_command(call: Call) -> None:
    status, out, _ = call("--data", "texts.jsonl", "--tokenizer", "checkpoint", "--json")
    assert status == 0
    document = json.loads(out)
    assert (document["rows"], document["longest"], document["rows_cut"]) == (40, 256, 15)
    assert [batch["chance_in_an_epoch"] for batch in document["micro_batches"]] == [0, 0, 0]
    status, out, _ = call("--data", "texts.jsonl")
    assert status == 0
    assert "rows of" in out


@pytest.mark.parametrize(
    ("arguments", "words_said"),
    [
        (("--tokenizer", "checkpoint"), "--tokenizer belongs to --data"),
        (("--data", "texts.jsonl", "--quick"), "Leave --quick out"),
        (("--data", "none.jsonl"), "none.jsonl does not exist"),
        (("--data", "texts.jsonl", "--tokenizer", "nowhere/x"), "gives no tokenizer"),
    ],
)
def test_bad_input(call: Call, arguments: tuple[str, ...], words_said: str) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert words_said in err
