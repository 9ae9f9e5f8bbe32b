"""The forms in which people keep examples, and the refusals: the same for a run and for an estimate."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli.terminal.profile_tables import _data
from harness.data import check_data, documents
from harness.data.documents import LARGEST_BYTES, LONGEST_LINE_BYTES, read_examples
from harness.data.examples import MOST_MESSAGES, Example, read_example
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.training.batches import build_batches
from tests.support.commands import Call

ASK, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def read(fields: dict[str, Any]) -> Example:
    return read_example(fields, "data: x, line 1")


def test_alpaca_is_its_own_prompt_and_the_answer() -> None:
    """Word for word as its authors trained it (github.com/tatsu-lab/stanford_alpaca, README)."""
    with_input = read({"instruction": "Add.", "input": "1 + 1", "output": "2"})
    assert with_input.text == "2"
    assert with_input.prompt == (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 + 1\n\n### Response:\n"
    )
    assert read({"instruction": "Go.", "input": "", "output": "ok"}).prompt == (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nGo.\n\n### Response:\n"
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chosen": "a", "rejected": "b"}, r"`chosen` and `rejected`, .* preference training \(DPO"),
        ({"prompt": "p", "chosen": [ASK], "rejected": [ASK]}, "preference training"),
        ({"prompt": "p", "completion": "c", "label": True}, r"preference training \(KTO\)"),
        ({"messages": []}, "`messages` is empty, not a list of messages"),
        ({"messages": "hello"}, "`messages` is str, not a list"),
        ({"messages": ["hello"]}, r"`messages`\[0\] is str, not an object"),
        ({"messages": [{"content": "a"}]}, r"`messages`\[0\] has no `role`"),
        ({"messages": [ASK, {"role": "assistant"}]}, r"`messages`\[1\] has no `content`"),
        ({"messages": [{"role": "user", "content": 1}]}, "`content` is int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds 'image'.*text alone"),
        ({"messages": [ASK] * (MOST_MESSAGES + 1)}, "1,001 messages"),
        ({"conversations": [{"from": "alien", "value": "a"}]}, "from 'alien', who is not known"),
        ({"conversations": [{"from": "human"}]}, "has no `value`"),
        ({"messages": [ASK], "tools": "none"}, "`tools` is str"),
        ({"instruction": "a", "output": None}, "`output` is null"),
        ({"question": "a"}, "lacks the fields .* it has 'question', and needs `text`; `prompt`"),
    ],
)
def test_what_cannot_be_learned_says_why(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read(fields)
    assert str(caught.value).startswith("data: x, line 1")


def test_a_call_of_a_tool_needs_no_words() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    example = read({"messages": [ASK, call], "tools": [{"name": "f"}]})
    assert example.messages[1]["tool_calls"] == call["tool_calls"]
    assert example.tools == ({"name": "f"},)


# --- files --------------------------------------------------------------------------------------------

ROWS = [{"instruction": "i", "input": "", "output": "o"}, {"messages": [ASK, ANSWER]}, {"text": "t"}]


def written(folder: Path, name: str) -> Path:
    path = folder / name
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
def test_the_kinds_of_a_json_file(tmp_path: Path, name: str) -> None:
    found = list(read_examples(str(written(tmp_path, name)), paragraphs=False))
    assert [bool(example.messages) for example in found] == [False, True, False]
    assert (found[0].text, found[2].text) == ("o", "t")


def test_a_parquet_file_is_read_row_by_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [{"messages": [ASK, ANSWER]}, {"messages": [ASK, {"role": "assistant", "content": "c"}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = list(read_examples(str(path), paragraphs=False))
    assert [example.messages[1]["content"] for example in found] == ["b", "c"]
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="not a parquet file that can be read"):
        list(read_examples(str(path), paragraphs=False))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"chosen": "a", "rejected": "b"}\n', "line 1 has `chosen`"),
        ("a.jsonl", "", "is empty"),
        ("a.json", "{}", "is a JSON dict, not a list"),
        ("a.json", "[1]", "example 1 is a JSON int"),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', "JSON lines are called .jsonl"),
        ("a.csv", "a,b", "suffix .csv"),
        ("a", "abc", "suffix \\(none\\)"),
        ("a.txt", " \n\n", "is empty"),
        ("a.jsonl", "\n\n", "is empty"),
        ("a.txt", b"\x00\x01\x02", "NUL bytes"),
        ("a.txt", b"caf\xe9", "not UTF-8 text \\(byte 3"),
        ("a.jsonl", b'{"text": "caf\xe9"}', "line 1 is not UTF-8"),
        ("a.jsonl", '{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is a JSON list, not an object"),
        ("a.jsonl", '{"prompt": "a"}\n', "line 1 lacks the fields"),
        ("a.jsonl", '\n{"text": null}\n', "line 2: `text` is null"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "line 1: `text` is not Unicode"),
        ("a.jsonl", b'{"text": "' + b"a" * LONGEST_LINE_BYTES + b'"}', "line 1 is longer than 16 MiB"),
        ("a.txt", "14 bytes of it", "holds 15 tokens, and one sequence needs seq_len: 16"),
        ("a.jsonl", '{"text": ""}\n' * 150, "none of its 150 documents has text to learn"),
        ("a.jsonl", '{"instruction": "do", "output": ""}\n', "leaves nothing to predict"),
        ("a.json", '[{"messages": [{"role": "user", "content": "who?"}]}]', "leaves nothing to predict"),
        ("a.jsonl", '{"prompt": "longer than a row", "completion": "b"}\n', "shorter prompts"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, str | bytes) else None,
)
def test_an_estimate_refuses_what_a_run_refuses(
    tmp_path: Path, name: str, content: str | bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    recipe = Recipe(model="tiny", data=str(path), seq_len=16)
    messages = []
    for refused in (
        lambda: check_data(recipe),
        lambda: build_batches(recipe, vocab_size=300, tokenizer_source=None, dense_mask=True),
    ):
        with pytest.raises(InputError, match=says) as caught:
            refused()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"data: {path}")
    assert "\n" not in messages[0]
    assert len(messages[0]) < 600 + len(str(path))


@pytest.mark.parametrize(
    "command", ["napkin", "simulate", "fit", "hardware", "shard", "validate", "sweep micro_batch_size=1,2"]
)
def test_the_commands_refuse_it(tmp_path: Path, command: str, call: Call) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"chosen": "a", "rejected": "b"}\n')
    name, *values = command.split()
    status, out, err = call(name, "smoke", f"data={path}", *values)
    assert (status, out) == (2, "")
    assert "preference training" in err


@pytest.mark.parametrize("suffix", ["txt", "json", "jsonl", "parquet"])
def test_a_pipe_in_the_place_of_data_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"a.{suffix}"
    os.mkfifo(path)
    monkeypatch.setattr(documents, "existing_path", lambda data: path)  # it was a file a moment ago
    with pytest.raises(InputError, match="it is not a regular file"):
        list(read_examples(str(path), paragraphs=False))


def test_a_pipe_in_a_checkpoint_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer_config.json")
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": [ASK, ANSWER]}))
    recipe = Recipe(model=str(tmp_path), weights="pretrained", data=str(data))
    with pytest.raises(InputError, match="has no chat template"):
        check_data(recipe)


@pytest.mark.parametrize("suffix", ["txt", "json"])
def test_what_would_be_read_at_once_has_a_bound(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    most = LARGEST_BYTES[f".{suffix}"]
    with path.open("wb") as file:
        file.truncate(most + 1)  # a hole, no bytes
    recipe = Recipe(model="tiny", data=str(path))
    for refused in (lambda: check_data(recipe), lambda: list(read_examples(str(path), paragraphs=False))):
        with pytest.raises(InputError, match=rf"at most {most:,} are read\. Write it as \.jsonl"):
            refused()


def test_what_a_run_learns_from_is_no_error_in_an_estimate(tmp_path: Path) -> None:
    """Whether behind a hundred empty examples, to the byte, or in a piece behind the first."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": ""}\n' * 250 + '{"text": "ab"}\n')
    text = tmp_path / "a.txt"
    text.write_text("15 bytes of it.")
    for recipe in (
        Recipe(model="tiny", data=str(rows), seq_len=16),
        Recipe(model="tiny", data=str(rows), seq_len=16, packing=True),
        Recipe(model="tiny", data=str(text), seq_len=16),
    ):
        check_data(recipe)
        build_batches(recipe, vocab_size=300, tokenizer_source=None, dense_mask=True)


def test_an_estimate_asks_nobody_for_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    check_data(Recipe(model="tiny", data="org/name"))
    check_data(Recipe(model="tiny"))


# --- lengths ------------------------------------------------------------------------------------------


def test_lengths_cuts_and_padding_are_counted_as_by_hand(tmp_path: Path) -> None:
    """Bytes are tokens: documents of 3, 10 and 6 with their end tokens, rows of 8."""
    path = tmp_path / "a.jsonl"
    lines = [{"text": "ab"}, {"text": "abcdefghi"}, {"prompt": "abc", "completion": "de"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def summary(**fields: Any) -> Any:
        recipe = Recipe(model="tiny", data=str(path), seq_len=8, **fields)
        return build_batches(recipe, vocab_size=300, tokenizer_source=None, dense_mask=True).rows.summary

    found = summary()
    assert (found.documents, found.rows, found.documents_cut, found.tokens_cut) == (3, 3, 1, 2)
    assert (found.longest_document_tokens, found.median_document_tokens) == (10, 6)
    assert found.padding_share == pytest.approx(1 - (3 + 8 + 6) / 24)
    assert found.learned_share == pytest.approx((2 + 7 + 3) / 24)
    packed = summary(packing=True)  # the long one goes on in another row: 8, 6 + 2
    assert (packed.rows, packed.documents_cut, packed.padding_share) == (3, 0, pytest.approx(1 - 19 / 24))


def test_the_terminal_says_them() -> None:
    data = {"documents": 1000, "rows": 900, "documents_cut": 7, "tokens_cut": 1234, "padding_share": 0.25}
    profile = type("Profile", (), {"provenance": {"data": data | {"longest_document_tokens": 5000}}})
    (line,) = _data(profile)  # type: ignore[arg-type]
    assert line == (
        "data: 1,000 documents in 900 rows, 25% of them padding; "
        "7 are cut off (1,234 tokens lost, the longest has 5,000)"
    )
    for other in ({}, {"data": None}, {"data": {"rows": "many"}}):
        assert _data(type("Profile", (), {"provenance": other})) == []  # type: ignore[arg-type]
