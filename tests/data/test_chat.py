"""Conversations: what a chat template makes of them, and that exactly the assistant's words are learned.

The oracle is the tokenizer: the tokens that are learned, decoded back, are what the assistant said.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from harness.data.check import check_data
from harness.errors import InputError
from harness.recipe.recipe import Recipe
from harness.training.batches import Batches, build_batches

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (  # like Llama-2's: nothing asks the assistant to speak
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
THOUGHTFUL = (  # like Qwen3's: thoughts are written into the last turn alone
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{{ raise_exception('roles must alternate') }}"
TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "héllo 👋"},
    {"role": "assistant", "content": "hello you"},
    {"role": "user", "content": "what is you?"},
    {"role": "assistant", "content": " you is 👋 fine "},
]


def checkpoint(folder: Path, template: str | None) -> str:
    """A byte-level tokenizer of a real model's kind, with merges, special tokens and `template`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["hello you what is fine user assistant system " * 9], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def batches_of(folder: Path, template: str | None, rows: list[Any], **fields: Any) -> tuple[Batches, Any]:
    source = checkpoint(folder / "checkpoint", template)
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(**{"model": source, "weights": "pretrained", "data": str(path), "seq_len": 256, **fields})
    check_data(recipe)
    batches = build_batches(recipe, vocab_size=400, tokenizer_source=source, dense_mask=True)
    return batches, PreTrainedTokenizerFast.from_pretrained(source)


def learned(batches: Batches, tokenizer: Any) -> list[str]:
    """The runs of neighbouring learned tokens of the first row, decoded."""
    batch = next(batches).batches[0]
    runs: list[list[int]] = []
    before = False
    for label in batch["labels"][0].tolist():
        if label != -100:
            runs = [*runs, []] if not before else runs
            runs[-1].append(label)
        before = label != -100
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHATML, ["hello you<|im_end|>\n", " you is 👋 fine <|im_end|>\n"]),
        (MARKED, ["hello you<|im_end|>", " you is 👋 fine <|im_end|>"]),
        (BRACKETS, [" hello you<|im_end|>", "  you is 👋 fine <|im_end|>"]),
        (THOUGHTFUL, ["hello you<|im_end|>\n", "<think>\n\n</think>\n\n you is 👋 fine <|im_end|>\n"]),
    ],
    ids=["chatml", "marked", "brackets", "thoughtful"],
)
def test_exactly_the_assistants_turns_are_learned(tmp_path: Path, template: str, words: list[str]) -> None:
    turns = TURNS[1:] if template == BRACKETS else TURNS
    batches, tokenizer = batches_of(tmp_path, template, [{"messages": turns}])
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = next(batches).batches[0]["input_ids"][0].tolist()
    assert (
        ids[: len(tokenizer(whole, add_special_tokens=False)["input_ids"])]
        == (tokenizer(whole, add_special_tokens=False)["input_ids"])
    )
    assert learned(batches, tokenizer) == words


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_of_a_prompt_and_a_completion_in_messages_the_completion_is_learned(
    tmp_path: Path, template: str
) -> None:
    rows = [{"prompt": TURNS[:4], "completion": TURNS[4:]}]
    batches, tokenizer = batches_of(tmp_path, template, rows)
    assert [text.strip() for text in learned(batches, tokenizer)] == ["you is 👋 fine <|im_end|>"]


def test_sharegpt_is_the_same_conversation(tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    ours, tokenizer = batches_of(tmp_path, CHATML, [{"conversations": turns}])
    theirs, _ = batches_of(tmp_path, CHATML, [{"messages": TURNS}])
    assert next(ours).batches[0]["labels"].tolist() == next(theirs).batches[0]["labels"].tolist()
    assert "hello you" in learned(ours, tokenizer)[0]


def test_parts_of_a_message_are_its_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "you"}]
    rows = [{"messages": [TURNS[1], {"role": "assistant", "content": parts}]}]
    batches, tokenizer = batches_of(tmp_path, CHATML, rows)
    assert learned(batches, tokenizer) == ["hello you<|im_end|>\n"]


def test_packed_conversations_keep_their_labels(tmp_path: Path) -> None:
    rows = [{"messages": TURNS}, {"messages": TURNS[:3]}]
    batches, tokenizer = batches_of(tmp_path, CHATML, rows, packing=True)
    assert sorted(learned(batches, tokenizer)) == sorted(
        ["hello you<|im_end|>\n", " you is 👋 fine <|im_end|>\n", "hello you<|im_end|>\n"]
    )


def test_random_weights_read_a_conversation_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": TURNS[1:3]}))
    recipe = Recipe(model="tiny", data=str(path), seq_len=128)
    batches = build_batches(recipe, vocab_size=300, tokenizer_source=None, dense_mask=True)
    labels = [label for label in next(batches).batches[0]["labels"][0].tolist() if label != -100]
    assert bytes(labels).decode() == "hello you<|im_end|>"


def test_without_a_chat_template_it_is_said_what_to_do(tmp_path: Path) -> None:
    """By estimates too, which read the folder's files and no library."""
    with pytest.raises(InputError, match=r"has no chat template .* add its chat_template\.jinja") as caught:
        batches_of(tmp_path, None, [{"messages": TURNS}])
    assert "check_data" in "".join(str(entry) for entry in caught.traceback)
    folder, data = str(tmp_path / "checkpoint"), str(tmp_path / "chat.jsonl")
    recipe = Recipe(model=folder, weights="pretrained", data=data)
    with pytest.raises(InputError, match="has no chat template"):
        build_batches(recipe, vocab_size=400, tokenizer_source=recipe.model, dense_mask=True)


REWRITING = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "says"),
    [(STRICT, "line 1: the chat template cannot render it"), (REWRITING, "otherwise once others follow it")],
)
def test_what_a_template_cannot_do_names_the_line(tmp_path: Path, template: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        batches_of(tmp_path, template, [{"messages": TURNS}])
    assert str(caught.value).startswith(f"data: {tmp_path / 'chat.jsonl'}, line 1")
    assert "\n" not in str(caught.value)
