"""A recipe's data as an endless sequence of rows of seq_len tokens, the same for the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import InputError
from harness.recipe import Recipe
from harness.training.data.documents import read_examples
from harness.training.data.packing import pack
from harness.training.data.tokenizer import Tokenizer, Tokens

NOT_PREDICTED = -100
"""The label torch's cross-entropy ignores by default."""
TEXTS_AT_ONCE = 1000
"""Texts given to the tokenizer in one call: enough to be fast, few enough to hold in memory."""

DRAWN_AT_ONCE = 2**20
"""Random tokens drawn only for what follows them."""


class Row(NamedTuple):
    """One sequence of seq_len tokens. The first token of each document has no label."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    document_lengths: list[int]
    """In order, padding as the last document; they add up to seq_len."""


class Rows(NamedTuple):
    """Where rows come from."""

    draw: Callable[[int], Row]
    """The row at a place of the endless sequence, from 0."""
    lengths: Callable[[int], list[int]]
    """The `document_lengths` of the row at a place; its tokens are not made to know them."""
    num_rows: int | None
    """Rows in one epoch; None if the data has no end."""
    num_skipped: int
    """Documents left out because no token of theirs can be predicted."""


class Piece(NamedTuple):
    """Neighbouring tokens of the corpus that go into one row."""

    start: int
    length: int
    num_prompt: int

    @property
    def num_unlearned(self) -> int:
        """Leading tokens without a label: the prompt, and the first, which nothing in front predicts."""
        return max(1, self.num_prompt)


class Corpus(NamedTuple):
    """Every document's tokens, end to end (one array: a list of small ones takes more than the tokens)."""

    tokens: Tokens
    documents: list[Piece]


def synthetic_rows(recipe: Recipe, vocab_size: int, longest: int) -> Rows:
    """Uniform random tokens; with packing, documents of 2 to `longest` / 2 tokens that fill every row."""

    def draw(number: int) -> Row:
        random = np.random.default_rng((recipe.seed, number))
        input_ids = random.integers(0, vocab_size, recipe.seq_len)
        lengths = _drawn_lengths(recipe, longest, random) if recipe.packing else [recipe.seq_len]
        labels = input_ids.copy()
        labels[np.cumsum([0, *lengths[:-1]])] = NOT_PREDICTED
        return Row(input_ids, labels, lengths)

    def lengths(number: int) -> list[int]:
        random = np.random.default_rng((recipe.seed, number))
        for at in range(0, recipe.seq_len, DRAWN_AT_ONCE):  # they are drawn after the tokens
            random.integers(0, vocab_size, min(DRAWN_AT_ONCE, recipe.seq_len - at))
        return _drawn_lengths(recipe, longest, random)

    return Rows(draw, lengths, num_rows=None, num_skipped=0)


def _drawn_lengths(recipe: Recipe, longest: int, random: np.random.Generator) -> list[int]:
    lengths: list[int] = []
    left = recipe.seq_len
    while left > 0:
        lengths.append(min(left, int(random.integers(2, max(2, longest // 2), endpoint=True))))
        left -= lengths[-1]
    return lengths


def corpus_rows(recipe: Recipe, tokenizer: Tokenizer, vocab_size: int, longest: int) -> Rows:
    """The rows of a file or a dataset, shuffled anew each epoch; no document is longer than `longest`.

    Raises InputError if the data cannot be read, has tokens beyond `vocab_size` or nothing to predict.
    """
    corpus = _read_corpus(recipe, tokenizer, vocab_size)
    pieces, num_skipped = _cut(recipe, corpus, longest)
    packed = pack([piece.length for piece in pieces], recipe.seq_len) if recipe.packing else None
    num_rows = len(packed or pieces)
    padding = tokenizer.end_of_document or 0
    epoch, order = -1, np.empty(0, dtype=np.int64)

    def draw(number: int) -> Row:
        nonlocal epoch, order
        if number // num_rows != epoch:
            epoch = number // num_rows
            order = np.random.default_rng((recipe.seed, epoch)).permutation(num_rows)
        index = int(order[number % num_rows])
        members = [pieces[i] for i in packed[index]] if packed else [pieces[index]]
        return _fill(corpus.tokens, members, recipe.seq_len, padding)

    return Rows(draw, lambda number: draw(number).document_lengths, num_rows, num_skipped)


def _read_corpus(recipe: Recipe, tokenizer: Tokenizer, vocab_size: int) -> Corpus:
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int32)
    parts: list[Tokens] = []
    documents: list[Piece] = []
    start = 0
    examples = read_examples(recipe.data, paragraphs=recipe.packing)
    while some := list(itertools.islice(examples, TEXTS_AT_ONCE)):
        openings = tokenizer.encode([example.prompt or example.text for example in some], True)
        completed = [example.text for example in some if example.prompt]
        completions = iter(tokenizer.encode(completed, False) if completed else [])
        for example, opening in zip(some, openings, strict=True):
            document = [opening, next(completions), end] if example.prompt else [opening, end]
            length = sum(map(len, document))
            documents.append(Piece(start, length, len(opening) if example.prompt else 0))
            parts += document
            start += length
    if not documents:
        raise InputError(f"data: {recipe.data} is empty. Give data with text in it, or data: synthetic.")
    tokens = np.concatenate(parts)
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise InputError(
            f"data: {recipe.data} becomes token {int(tokens.max())}, and model: {recipe.model} has only "
            f"{vocab_size} tokens. Use the tokenizer the model was trained with."
        )
    return Corpus(tokens, documents)


def _cut(recipe: Recipe, corpus: Corpus, longest: int) -> tuple[list[Piece], int]:
    """Pieces of at most `longest` tokens, and how many documents left none.

    A piece without a token to predict is left out: alone in its row it would make the loss 0 / 0, and
    among others it would change nothing.
    """
    stream = recipe.data.lower().endswith(".txt") and not recipe.packing
    pieces: list[Piece] = []
    num_skipped = 0
    for document in corpus.documents:
        if stream:
            lengths = [longest] * (document.length // longest)
        elif recipe.packing and not document.num_prompt:
            lengths = [min(longest, document.length - at) for at in range(0, document.length, longest)]
        else:
            lengths = [min(longest, document.length)]
        starts = itertools.accumulate(lengths[:-1], initial=document.start)
        cut = [
            Piece(start, length, document.num_prompt) for start, length in zip(starts, lengths, strict=False)
        ]
        kept = [piece for piece in cut if piece.length > piece.num_unlearned]
        pieces += kept
        num_skipped += not kept
    if stream and not pieces:
        raise InputError(
            f"data: {recipe.data} holds {len(corpus.tokens)} tokens, and one sequence needs seq_len: "
            f"{recipe.seq_len}. Give a longer file, or set seq_len to at most {len(corpus.tokens)}."
        )
    if not pieces:
        raise InputError(
            f"data: {recipe.data} leaves nothing to predict: none of its {len(corpus.documents)} documents "
            f"has text to learn within its first {longest} tokens (a prompt is read, not learned). "
            "Give longer texts or shorter prompts, or raise seq_len."
        )
    return pieces, num_skipped


def _fill(tokens: Tokens, pieces: Sequence[Piece], seq_len: int, padding: int) -> Row:
    input_ids = np.full(seq_len, padding, dtype=np.int64)
    labels = np.full(seq_len, NOT_PREDICTED, dtype=np.int64)
    at = 0
    for piece in pieces:
        learned, end = at + piece.num_unlearned, at + piece.length
        input_ids[at:end] = tokens[piece.start : piece.start + piece.length]
        labels[learned:end] = input_ids[learned:end]
        at = end
    lengths = [piece.length for piece in pieces]
    return Row(input_ids, labels, lengths if at == seq_len else [*lengths, seq_len - at])
