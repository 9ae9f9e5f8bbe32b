"""The lengths of a data set's examples in tokens, before anything is cut or padded."""

import itertools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from harness.data.check import check_data
from harness.data.documents import empty, read_examples
from harness.data.pairs import pair_reader, written_pairs
from harness.data.rows import TEXTS_AT_ONCE, tokenized
from harness.data.tokenizer import NUM_BYTES, build_tokenizer
from harness.errors import InputError
from harness.recipe import Recipe, find_model_config

MOST_WORDS_OF_BYTES = 2 * NUM_BYTES
"""A vocabulary of at most this size is one of bytes and a few signs."""


def example_lengths(
    recipe: Recipe, data: str, *, vocab_size: int | None, tokenizer: str | None = None
) -> NDArray[np.int64]:
    """The tokens of every example of `data`, in order, as in a row of its own. A pair is two rows, one after
    the other: chosen and rejected, or the two texts that belong together.

    `tokenizer`: a folder or a Hugging Face id. None: the tokenizer in the recipe's model folder, or bytes for
    a model whose small vocabulary says that it reads bytes. `vocab_size`: the model's; None if it is not
    known. Raises InputError where there is no tokenizer, and for data that is one text or cannot be read.
    """
    named = recipe.model_copy(update={"data": data, "packing": False})
    if data.lower().endswith(".txt"):
        raise InputError(
            f"--data {data}: a .txt file is one text, cut into rows of seq_len: every batch is as long as "
            "every other. Give data of examples (.jsonl, .json, .parquet), or ask without --data."
        )
    check_data(named)
    source = tokenizer or recipe.model
    # a config.json without a folder that could have a tokenizer
    is_config_alone = find_model_config(recipe.model) or Path(recipe.model).expanduser().is_file()
    if tokenizer is None and is_config_alone:
        if vocab_size is None or vocab_size > MOST_WORDS_OF_BYTES:
            raise InputError(
                f"--data {data}: model: {recipe.model} is a config without a tokenizer, so nothing tells how "
                "many tokens a text has. Give --tokenizer with a checkpoint's folder, or set model to one."
            )
        words = build_tokenizer(
            named.model_copy(update={"weights": "random"}), vocab_size=vocab_size, tokenizer_source=None
        )
    else:
        pretrained = named.model_copy(update={"weights": "pretrained", "model": source})
        words = build_tokenizer(pretrained, vocab_size=vocab_size or 0, tokenizer_source=source)
    lengths: list[int] = []
    if recipe.compares:
        pairs = read_examples(data, paragraphs=False, read=pair_reader(recipe))
        while batch := list(itertools.islice(pairs, TEXTS_AT_ONCE)):
            lengths += [len(side) for pair in written_pairs(recipe, batch, words) for side in pair.sides]
    else:
        examples = read_examples(data, paragraphs=False)
        while texts := list(itertools.islice(examples, TEXTS_AT_ONCE)):
            lengths += [len(chat.tokens) for chat, _ in tokenized(texts, words)]
    if not any(lengths):
        raise InputError(empty(data))
    return np.array(lengths, dtype=np.int64)
