"""The data path: what is in a batch, that it is the same again, and every way the input can be wrong."""

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from harness.data.rows import pack
from harness.errors import InputError, MissingDependency
from harness.recipe.recipe import Recipe
from harness.training.batches import Batches, build_batches

VOCAB_SIZE = 300
END = 256  # the byte-level end-of-document token


def batches_of(data: str | Path, *, dense_mask: bool = True, **fields: Any) -> Batches:
    vocab_size = fields.pop("vocab_size", VOCAB_SIZE)
    arguments = {name: fields.pop(name, None) for name in ("tokenizer_source", "sliding_window")}
    arguments["shapes_only"] = fields.pop("shapes_only", False)
    recipe = Recipe(**{"model": "tiny", "data": str(data), "precision": "fp32", **fields})
    return build_batches(recipe, vocab_size=vocab_size, dense_mask=dense_mask, **arguments)


def written(folder: Path, name: str, content: str | bytes | list[Any]) -> Path:
    """A file of this text, these bytes, or these objects one JSON line each."""
    if isinstance(content, list):
        content = "".join(json.dumps(line) + "\n" for line in content)
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def epoch_of(batches: Batches) -> list[dict[str, Tensor]]:
    """One epoch's micro batches of one row."""
    assert batches.rows.num_rows is not None
    return [step.batches[0] for step in islice(batches, batches.rows.num_rows)]


def documents_of(batch: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    """(tokens, labels) of each document of a packed batch, cut where the positions restart."""
    for ids, labels, positions in zip(
        *(batch[k].tolist() for k in ("input_ids", "labels", "position_ids")), strict=True
    ):
        starts = [i for i, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
            assert positions[start:end] == list(range(end - start))
            yield ids[start:end], labels[start:end]


# --- what is in a batch -------------------------------------------------------------------------------


def test_text_is_one_stream_of_bytes_cut_into_rows(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "ab\n\ncdéfg")  # é is two bytes
    stream = [97, 98, 10, 10, 99, 100, 0xC3, 0xA9, 102, 103, END]
    rows = [batch["input_ids"].tolist() for batch in epoch_of(batches_of(path, seq_len=3))]
    assert sorted(rows) == sorted([[stream[i : i + 3]] for i in (0, 3, 6)])  # the last two are left out


def test_a_text_row_predicts_all_but_its_first_token(tmp_path: Path) -> None:
    step = next(batches_of(written(tmp_path, "a.txt", "abcd"), seq_len=4))
    assert step.batches[0]["input_ids"].tolist() == [[97, 98, 99, 100]]
    assert step.batches[0]["labels"].tolist() == [[-100, 98, 99, 100]]
    assert step.num_tokens == 3
    assert set(step.batches[0]) == {"input_ids", "labels"}


def test_a_short_example_is_padded_and_a_prompt_is_not_learned(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", [{"prompt": "ab", "completion": "cd"}])
    step = next(batches_of(path, seq_len=7))
    assert step.batches[0]["input_ids"].tolist() == [[97, 98, 99, 100, END, END, END]]
    assert step.batches[0]["labels"].tolist() == [[-100, -100, 99, 100, END, -100, -100]]
    assert step.num_tokens == 3


def test_a_long_example_is_cut_off(tmp_path: Path) -> None:
    step = next(batches_of(written(tmp_path, "a.jsonl", [{"text": "abcdef"}]), seq_len=4))
    assert step.batches[0]["input_ids"].tolist() == [[97, 98, 99, 100]]
    assert step.num_tokens == 3


def test_examples_with_nothing_to_predict_are_counted(tmp_path: Path) -> None:
    lines = [{"text": ""}, {"prompt": "abcdef", "completion": "g"}, {"text": "xy"}]
    batches = batches_of(written(tmp_path, "a.jsonl", lines), seq_len=4)
    assert (batches.rows.num_rows, batches.rows.num_skipped) == (1, 2)


def test_without_room_for_an_end_token_there_is_none(tmp_path: Path) -> None:
    step = next(batches_of(written(tmp_path, "a.jsonl", [{"text": "ab"}]), seq_len=4, vocab_size=256))
    assert step.batches[0]["input_ids"].tolist() == [[97, 98, 0, 0]]
    assert step.num_tokens == 1


@pytest.mark.parametrize("packing", [False, True])
def test_a_step_has_its_micro_batches_and_counts_all_their_tokens(packing: bool) -> None:
    batches = batches_of(
        "synthetic", packing=packing, micro_batch_size=2, gradient_accumulation_steps=3, seq_len=16
    )
    for step in islice(batches, 4):
        assert [tuple(batch["input_ids"].shape) for batch in step.batches] == [(2, 16)] * 3
        assert all(batch[k].dtype == torch.int64 for batch in step.batches for k in ("input_ids", "labels"))
        assert step.num_tokens == sum(int((b["labels"][:, 1:] != -100).sum()) for b in step.batches)
    lengths = Counter(len(ids) for batch in step.batches for ids, _ in documents_of(batch)) if packing else {}
    assert packing == (len(lengths) > 1)


def test_synthetic_tokens_cover_the_vocabulary_evenly() -> None:
    ids = torch.cat([s.batches[0]["input_ids"] for s in islice(batches_of("synthetic", vocab_size=8), 5)])
    counts = torch.bincount(ids.flatten(), minlength=8).tolist()
    # 10240 draws of 8 values: 1280 each, standard deviation 33; six of them either way
    assert len(counts) == 8
    assert all(1080 < count < 1480 for count in counts)


def test_a_dataset_of_the_hub_gives_its_train_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake_datasets(monkeypatch, [{"text": "abc", "id": 1}])
    assert next(batches_of("org/name", seq_len=4)).batches[0]["input_ids"].tolist() == [[97, 98, 99, END]]
    assert asked == [(("org/name",), {"split": "train"})]


def fake_datasets(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[Any]:
    """A `datasets` package whose load_dataset returns or raises `result`; the list of its calls."""
    calls: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        if isinstance(result, Exception):
            raise result
        return result

    package, exceptions = ModuleType("datasets"), ModuleType("datasets.exceptions")
    package.load_dataset = load_dataset  # type: ignore[attr-defined]
    exceptions.DatasetsError = type("DatasetsError", (Exception,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.exceptions", exceptions)
    return calls


def checkpoint_tokenizer(folder: Path) -> str:
    """A saved tokenizer of words that puts <s> 1 before and </s> 2 behind every text, as some do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "say", "yes", "no"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    return str(folder)


def test_pretrained_weights_bring_their_tokenizer(tmp_path: Path) -> None:
    source = checkpoint_tokenizer(tmp_path / "checkpoint")
    path = written(tmp_path, "a.jsonl", [{"prompt": "say", "completion": "yes no"}])
    step = next(batches_of(path, weights="pretrained", tokenizer_source=source, seq_len=8))
    assert step.batches[0]["input_ids"].tolist() == [[1, 3, 4, 5, 2, 2, 2, 2]]
    assert step.batches[0]["labels"].tolist() == [[-100, -100, 4, 5, 2, -100, -100, -100]]


# --- the same again -----------------------------------------------------------------------------------


def corpus(folder: Path) -> Path:
    return written(folder, "a.jsonl", [{"text": f"{i:02d}" * (1 + i % 7)} for i in range(23)])


def equal(one: list[Any], other: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) else a == b

    return all(
        x.num_tokens == y.num_tokens
        and all(same(a[k], b[k]) for a, b in zip(x.batches, y.batches, strict=True) for k in a | b)
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("source", ["synthetic", "corpus"])
def test_same_seed_same_batches_and_a_state_continues_them(
    tmp_path: Path, source: str, packing: bool
) -> None:
    data = "synthetic" if source == "synthetic" else corpus(tmp_path)
    fields: dict[str, Any] = {"packing": packing, "micro_batch_size": 2, "seq_len": 16}
    steps = list(islice(batches_of(data, **fields), 20))
    assert equal(steps, list(islice(batches_of(data, **fields), 20)))
    assert not equal(steps, list(islice(batches_of(data, seed=1, **fields), 20)))
    for done in (0, 3, 13):  # 13 steps of 2 rows are past the first epoch of 23
        before, after = batches_of(data, **fields), batches_of(data, **fields)
        list(islice(before, done))
        after.load_state(json.loads(json.dumps(before.state())))
        assert equal(list(islice(after, 20 - done)), steps[done:])


def test_each_epoch_has_every_row_once_in_another_order(tmp_path: Path) -> None:
    batches = batches_of(corpus(tmp_path), seq_len=16)
    first, second = ([batch["input_ids"].tolist() for batch in epoch_of(batches)] for _ in range(2))
    assert len(first) == 23
    assert sorted(first) == sorted(second)
    assert first != second


def test_accumulation_sees_the_rows_a_larger_batch_would(tmp_path: Path) -> None:
    path = corpus(tmp_path)
    small = batches_of(path, seq_len=16, micro_batch_size=2, gradient_accumulation_steps=3)
    large = batches_of(path, seq_len=16, micro_batch_size=6)
    for one, other in islice(zip(small, large, strict=False), 5):
        assert one.num_tokens == other.num_tokens
        joined = torch.cat([batch["input_ids"] for batch in one.batches])
        assert torch.equal(joined, other.batches[0]["input_ids"])


def test_a_position_in_other_data_is_refused(tmp_path: Path) -> None:
    state = batches_of(corpus(tmp_path), seq_len=16).state()
    with pytest.raises(InputError, match="num_rows: 23, and this run None"):
        batches_of("synthetic").load_state(state)
    with pytest.raises(InputError, match="seed: 0, and this run 1"):
        batches_of(corpus(tmp_path), seq_len=16, seed=1).load_state(state)
    with pytest.raises(InputError, match="rows_drawn: -1"):
        batches_of(corpus(tmp_path), seq_len=16).load_state(state | {"rows_drawn": -1})


# --- packing ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_packing_puts_every_document_in_one_row_with_room(lengths: list[int], seq_len: int) -> None:
    rows = pack(lengths, seq_len)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[document] for document in row) for row in rows)
    assert all(size <= seq_len for size in sizes)
    # no two rows would have fitted in one
    assert len(sizes) < 2 or sizes[0] + sizes[1] > seq_len


def test_packing_refuses_a_document_longer_than_a_row() -> None:
    with pytest.raises(ValueError, match="9 tokens"):
        pack([9], 8)


TEXTS = st.lists(st.text(st.characters(codec="ascii"), max_size=30), min_size=1, max_size=12)


@settings(max_examples=60)
@given(texts=TEXTS, seq_len=st.integers(4, 24), seed=st.integers(0, 3))
def test_packed_rows_hold_every_token_once_an_epoch(texts: list[str], seq_len: int, seed: int) -> None:
    texts.append("at least one")
    wanted = Counter()
    for text in texts:
        tokens = [*text.encode(), END]
        cut = [tuple(tokens[i : i + seq_len]) for i in range(0, len(tokens), seq_len)]
        wanted.update(piece for piece in cut if len(piece) > 1)  # a lone token has nothing to predict
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), "a.jsonl", [{"text": text} for text in texts])
        batches = batches_of(path, packing=True, seq_len=seq_len, seed=seed)
    found = Counter()
    for batch in epoch_of(batches):
        assert (
            batch["input_ids"].shape == batch["labels"].shape == batch["position_ids"].shape == (1, seq_len)
        )
        assert batch["attention_mask"].shape == (1, 1, seq_len, seq_len)
        assert int((batch["labels"] != -100).sum()) > 0
        for tokens, labels in documents_of(batch):
            assert labels[0] == -100
            if set(labels) == {-100}:  # the padding
                continue
            assert labels[1:] == tokens[1:]
            found[tuple(tokens)] += 1
    assert found == wanted


def test_paragraphs_are_the_documents_of_a_text(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "ab\nc\n\n \n  de\n\n\n")
    (batch,) = epoch_of(batches_of(path, packing=True, seq_len=16))
    documents = sorted((tokens, labels) for tokens, labels in documents_of(batch))
    assert [tokens for tokens, labels in documents if set(labels) != {-100}] == [
        [*b"  de", END],
        [*b"ab\nc", END],
    ]


def test_a_packed_prompt_is_not_learned_and_never_split_from_its_completion(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", [{"prompt": "abc", "completion": "defghijkl"}])
    (batch,) = epoch_of(batches_of(path, packing=True, seq_len=6))
    assert batch["input_ids"].tolist() == [[*b"abcdef"]]
    assert batch["labels"].tolist() == [[-100, -100, -100, *b"def"]]


def test_no_packed_document_is_longer_than_what_attention_sees(tmp_path: Path) -> None:
    """transformers does not narrow a mask that it is given to the window of the model."""
    batches = batches_of(corpus(tmp_path), packing=True, seq_len=24, sliding_window=6)
    assert max(len(ids) for ids, _ in documents_of(next(batches).batches[0])) == 6


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"precision": "bf16"}, torch.bfloat16),
        ({"precision": "fp16"}, torch.float16),
        ({"precision": "bf16-mixed"}, torch.float32),
    ],
)
def test_eager_adds_a_mask_of_the_weights_dtype(fields: dict[str, Any], dtype: torch.dtype) -> None:
    recipe = Recipe(model="tiny", packing=True, attention="eager", seq_len=16, **fields)
    batches = build_batches(recipe, vocab_size=VOCAB_SIZE, tokenizer_source=None, dense_mask=True)
    mask = next(batches).batches[0]["attention_mask"]
    assert mask.dtype == dtype
    assert set(mask.unique().tolist()) == {0.0, torch.finfo(dtype).min}


def test_flash_attention_gets_the_lengths_transformers_reads_from_the_positions(tmp_path: Path) -> None:
    batches = batches_of(
        corpus(tmp_path),
        packing=True,
        seq_len=24,
        dense_mask=False,
        attention="flash_attention_2",
        precision="bf16",
    )
    for batch in epoch_of(batches):
        assert "attention_mask" not in batch
        (ends_q, ends_k), (longest_q, longest_k) = prepare_fa_kwargs_from_position_ids(batch["position_ids"])
        assert batch["cu_seq_lens_q"].tolist() == ends_q.tolist()
        assert batch["cu_seq_lens_k"].tolist() == ends_k.tolist()
        assert batch["cu_seq_lens_q"].dtype == ends_q.dtype == torch.int32
        assert (batch["max_length_q"], batch["max_length_k"]) == (longest_q, longest_k)
        assert type(batch["max_length_q"]) is int


# --- shapes without rows ------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
@pytest.mark.parametrize("packing", [False, True])
def test_shapes_are_those_of_the_rows(packing: bool, attention: str) -> None:
    fields: dict[str, Any] = {"packing": packing, "attention": attention, "seq_len": 64}
    fields |= {"gradient_accumulation_steps": 3, "precision": "bf16"}
    dense_mask = attention != "flash_attention_2"
    real, shapes = (
        batches_of("synthetic", dense_mask=dense_mask, shapes_only=shapes_only, **fields)
        for shapes_only in (False, True)
    )
    assert len(next(shapes).batches) == len(next(real).batches) == 3
    for batches in (real, shapes):
        batches.skip(4)
    for one, other in zip(next(real).batches, next(shapes).batches, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if not isinstance(value, Tensor):
                assert value == other[name]
                continue
            moved, shape = (tensor.to("meta", copy=True) for tensor in (value, other[name]))
            assert (moved.shape, moved.dtype, moved.stride()) == (shape.shape, shape.dtype, shape.stride())
            assert moved.untyped_storage().nbytes() == shape.untyped_storage().nbytes()


def test_shapes_of_any_length_take_no_memory() -> None:
    held = {"gradient_accumulation_steps": 2, "seq_len": 2**31 - 1, "micro_batch_size": 2**16}
    for batch in next(batches_of("synthetic", shapes_only=True, **held)).batches:
        assert batch["input_ids"].shape == (2**16, 2**31 - 1)
        assert {t.untyped_storage().nbytes() for t in batch.values()} == {8}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"micro_batch_size": 2**31 - 1, "seq_len": 2**31 - 1}, "micro_batch_size: 2147483647 and seq_len"),
        ({"packing": True, "attention": "eager", "seq_len": 2**31 - 1}, "more than 2\\^63 bytes"),
        ({"gradient_accumulation_steps": 10_001}, "at most 10,000"),
        (
            {"packing": True, "attention": "flash_attention_2", "precision": "bf16", "seq_len": 2**29},
            "packing: flash attention wants .* 536,870,912 tokens",
        ),
    ],
)
def test_what_cannot_be_walked_through_is_refused(fields: dict[str, Any], says: str) -> None:
    dense_mask = fields.get("attention") != "flash_attention_2"
    with pytest.raises(InputError, match=says):
        next(batches_of("synthetic", shapes_only=True, dense_mask=dense_mask, **fields))


def test_as_many_micro_batches_as_the_message_says_are_walked_through() -> None:
    step = next(batches_of("synthetic", shapes_only=True, gradient_accumulation_steps=10_000))
    assert len(step.batches) == 10_000


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("missing.txt", "does not exist"),
        ("missing/corpus.JSONL", "does not exist"),
        ("./corpus", "does not exist"),
        ("/no/such/place", "does not exist"),
        ("~nobody-of-this-name/a", "cannot be read"),
        ("a/b/c", "does not exist"),
        ("has space", "does not exist"),
        ("nul\0byte", "does not exist"),
        ("n" * 5000 + ".txt", "cannot be read|does not exist"),
        ("/dev/null", "not a regular file"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_a_path_is_never_looked_up_as_a_dataset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = fake_datasets(monkeypatch, [{"text": "a"}])
    with pytest.raises(InputError, match=says):
        batches_of(data)
    assert not asked


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "abc")
    path.chmod(0)
    with pytest.raises(InputError, match="cannot be read: Permission denied"):
        batches_of(path)


@pytest.mark.parametrize(
    "error",
    [ConnectionError("Couldn't reach\nthe Hub"), FileNotFoundError("no such"), ValueError("Config missing")],
)
def test_a_dataset_that_does_not_load_is_one_paragraph(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fake_datasets(monkeypatch, error)
    with pytest.raises(InputError, match="data: org/name is neither a file here nor") as failure:
        batches_of("org/name")
    assert "\n" not in str(failure.value)


def test_a_dataset_without_the_columns_names_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_datasets(monkeypatch, [{"question": "a", "answer": "b"}])
    with pytest.raises(InputError, match=r"row 0 lacks the fields .* it has 'question', 'answer'"):
        batches_of("org/name")


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependency, match=r"harness\[data\]"):
        batches_of("org/name")


def test_bytes_need_a_vocabulary_of_256(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="256 tokens, and model: tiny has 255"):
        batches_of(written(tmp_path, "a.txt", "abc"), vocab_size=255)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    source = checkpoint_tokenizer(tmp_path / "checkpoint")
    path = written(tmp_path, "a.jsonl", [{"text": "say yes no"}])
    with pytest.raises(InputError, match="becomes token 5, and model: tiny has only 5"):
        batches_of(path, weights="pretrained", tokenizer_source=source, vocab_size=5)


@pytest.mark.parametrize("config", [LlamaConfig(), GPT2Config(), None])
def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path, config: PretrainedConfig | None) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    if config is not None:
        config.save_pretrained(folder)
    path = written(tmp_path, "a.txt", "abc")
    with pytest.raises(InputError, match="tokenizer") as failure:
        batches_of(path, weights="pretrained", tokenizer_source=str(folder))
    assert str(failure.value).startswith(f"model: {folder}")
    assert "\n" not in str(failure.value)
