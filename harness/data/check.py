"""Checks, for estimates, that a run could read the recipe's data. Imports no torch."""

import itertools
from pathlib import Path
from typing import Any

from harness.data.documents import LARGEST_BYTES, Read, empty, existing_path, file_examples, no_chat_template
from harness.data.examples import Example, read_example
from harness.data.pairs import Pair, all_pairs, learned_from, pair_reader, pair_rows
from harness.data.rows import corpus_rows, is_stream, tokenized
from harness.data.tokenizer import NUM_BYTES, byte_tokenizer
from harness.errors import InputError
from harness.recipe import Recipe
from harness.system import read_whole

NUM_CHECKED = 100
"""How many examples are read, to refuse what a run would refuse."""
LARGEST_CHECKED_BYTES = 2**26
"""The largest .txt or .json file that is checked."""
A_VOCABULARY = NUM_BYTES + 1
"""The size of a vocabulary of bytes and a token that ends a document. Texts as bytes have no other tokens,
whatever the model's own vocabulary."""


def check_data(recipe: Recipe) -> None:
    """Raise the InputError that a run would raise for the recipe's data: for the form of the file and its
    first examples, and, with random weights, for data in which nothing can be predicted.

    Estimates need no data, so a data set of the Hub is neither fetched nor checked.
    """
    if recipe.data == "synthetic":
        return
    path = existing_path(recipe.data)
    if path is None:
        return
    if LARGEST_CHECKED_BYTES < path.stat().st_size <= LARGEST_BYTES.get(path.suffix.lower(), 0):
        return
    read: Read[Any] = pair_reader(recipe) if recipe.compares else read_example
    examples = list(itertools.islice(file_examples(recipe.data, path, recipe.packing, read), NUM_CHECKED))
    if not examples:
        raise InputError(empty(recipe.data))
    template = _chat_template_file(recipe)
    if template is False and any(_is_conversation(example) for example in examples):
        raise InputError(no_chat_template(recipe.data, recipe.model))
    if recipe.weights == "random" and not _has_something_to_learn(recipe, path):
        # one of these raises InputError, with a run's own sentence
        words = byte_tokenizer(recipe, A_VOCABULARY)
        if recipe.compares:
            pair_rows(recipe, words, A_VOCABULARY)
        else:
            corpus_rows(recipe, words, A_VOCABULARY, recipe.seq_len)


def _is_conversation(example: Example | Pair) -> bool:
    return isinstance(example.prompt, tuple) if isinstance(example, Pair) else bool(example.messages)


def _has_something_to_learn(recipe: Recipe, path: Path) -> bool:
    """Whether any example of the file has a token to learn within its first seq_len bytes."""
    if is_stream(recipe):
        return path.stat().st_size + 1 >= recipe.seq_len
    tokenizer = byte_tokenizer(recipe, A_VOCABULARY)
    if recipe.compares:
        return any(learned_from(recipe, pair) for pair in all_pairs(recipe, tokenizer))
    examples = file_examples(recipe.data, path, recipe.packing)
    while texts := list(itertools.islice(examples, NUM_CHECKED)):
        for chat, whole in tokenized(texts, tokenizer):
            learned = chat.learned[1:] if recipe.packing and not whole else chat.learned[1 : recipe.seq_len]
            if learned.any():
                return True
    return False


def _chat_template_file(recipe: Recipe) -> bool | None:
    """Whether the folder of pretrained weights has a chat template; None where `model` is no such folder."""
    folder = Path(recipe.model).expanduser()
    if recipe.weights != "pretrained" or not folder.is_dir():
        return None
    names = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
    if any((folder / name).exists() for name in names):
        return True
    try:
        return b'"chat_template"' in read_whole(folder / "tokenizer_config.json", LARGEST_CHECKED_BYTES)
    except OSError:
        return False
