"""A recipe's data as an endless sequence of rows of seq_len tokens, which is the same for the same seed."""

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.data.chat import Chat
from harness.data.documents import empty, read_examples
from harness.data.examples import Example
from harness.data.tokenizer import Tokenizer, Tokens
from harness.errors import InputError
from harness.recipe import Recipe


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Packs documents of these lengths into rows: for each row the indices of its documents, which have at
    most `seq_len` tokens together. Every document is in one row.

    The algorithm is best-fit decreasing: the longest document first, each into the fullest row with room for
    it. Raises ValueError for a document longer than a row.
    """
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}  # free tokens -> rows
    rooms: list[int] = []  # the keys of rows_with_room, sorted
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        if length > seq_len:
            raise ValueError(f"document {document} has {length} tokens, a row {seq_len}")
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows.append([])
            row, room = len(rows) - 1, seq_len
        else:
            room = rooms[place]
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                del rows_with_room[room], rooms[place]
        rows[row].append(document)
        left = room - length
        if left not in rows_with_room:
            rows_with_room[left] = []
            insort(rooms, left)
        rows_with_room[left].append(row)
    return rows


NOT_PREDICTED = -100
"""The label torch's cross-entropy ignores by default."""
TEXTS_AT_ONCE = 1000
"""Texts given to the tokenizer in one call: enough to be fast, few enough to hold in memory."""

DRAWN_AT_ONCE = 2**20
"""Random tokens that are drawn in one call where only the random numbers behind them are needed."""


class Row(NamedTuple):
    """One sequence of seq_len tokens. The first token of each document has no label."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    document_lengths: list[int]
    """The lengths of the documents, in order, with padding as the last one. They add up to seq_len."""
    good: bool = True
    """Whether a marked answer is good; else True."""


class DataSummary(NamedTuple):
    """How documents fit into rows of seq_len tokens, counted over one epoch."""

    documents: int
    rows: int
    longest_document_tokens: int
    median_document_tokens: int
    documents_cut: int
    """Documents that are longer than a row, and cut off at its end."""
    tokens_cut: int
    """Tokens of those documents behind the cut."""
    padding_share: float
    """The share of padding among all tokens in the rows."""
    learned_share: float
    """The share of tokens with a label among all tokens in the rows."""


class Rows(NamedTuple):
    """The source of rows: an endless sequence, whose places count from 0."""

    draw: Callable[[int], Row]
    """The row at a place of the sequence."""
    lengths: Callable[[int], list[int]]
    """The `document_lengths` of the row at a place. Synthetic tokens need not be kept for them."""
    num_rows: int | None
    """Rows in one epoch; None if the data has no end."""
    num_skipped: int
    """Documents that are left out because none of their tokens can be predicted."""
    summary: DataSummary | None = None
    """How the documents fit into the rows; None for synthetic data."""
    mismatched: Callable[[int, int], Row] | None = None
    """For pairs and marked answers: the row of the prompt at one place and the answer at another."""
    padding: int | None = None
    """For pairs and marked answers: the token that fills rows."""


class Piece(NamedTuple):
    """Successive tokens of the corpus: a document, or the part of one that goes into a row."""

    start: int
    length: int
    whole: bool
    """Whether it must be read from its beginning, as a prompt with its completion, or a conversation."""


class Corpus(NamedTuple):
    """Every document's tokens, end to end. A list with an array for each would take more than the tokens."""

    tokens: Tokens
    learned: NDArray[np.bool_]
    """Whether each token is to be predicted. The first of a document never is, whatever this says."""
    documents: list[Piece]


def synthetic_rows(recipe: Recipe, vocab_size: int, longest: int) -> Rows:
    """Rows of uniform random tokens. With packing, documents of 2 to `longest` / 2 tokens fill every row."""

    def draw(number: int) -> Row:
        random = np.random.default_rng((recipe.seed, number))
        input_ids = random.integers(0, vocab_size, recipe.seq_len)
        lengths = _drawn_lengths(recipe, longest, random) if recipe.packing else [recipe.seq_len]
        labels = input_ids.copy()
        labels[np.cumsum([0, *lengths[:-1]])] = NOT_PREDICTED
        return Row(input_ids, labels, lengths)

    def lengths(number: int) -> list[int]:
        random = np.random.default_rng((recipe.seed, number))
        for at in range(0, recipe.seq_len, DRAWN_AT_ONCE):  # lengths are drawn after the tokens
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
    """The rows of a file or a data set, shuffled anew each epoch. Documents have at most `longest` tokens.

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
        return _fill(corpus, members, recipe.seq_len, padding)

    def lengths(number: int) -> list[int]:
        return draw(number).document_lengths

    summary = _summary(recipe, corpus, pieces, num_rows, longest)
    return Rows(draw, lengths, num_rows, num_skipped, summary)


def _summary(
    recipe: Recipe, corpus: Corpus, pieces: Sequence[Piece], num_rows: int, longest: int
) -> DataSummary:
    lengths = np.array([document.length for document in corpus.documents], dtype=np.int64)
    cut_off = np.array([not _goes_on(recipe, document) for document in corpus.documents])
    beyond = np.maximum(lengths - longest, 0) * cut_off
    in_rows = num_rows * recipe.seq_len
    return DataSummary(
        documents=len(lengths),
        rows=num_rows,
        longest_document_tokens=int(lengths.max()),
        median_document_tokens=int(np.median(lengths)),
        documents_cut=int((beyond > 0).sum()),
        tokens_cut=int(beyond.sum()),
        padding_share=1 - sum(piece.length for piece in pieces) / in_rows,
        learned_share=sum(int(_learned_of(corpus, piece).sum()) for piece in pieces) / in_rows,
    )


def is_stream(recipe: Recipe) -> bool:
    """Whether the data is one text, which is cut into rows wherever they end."""
    return recipe.data.lower().endswith(".txt") and not recipe.packing


def _goes_on(recipe: Recipe, document: Piece) -> bool:
    """Whether the part of a document that does not fit into a row goes into the next one."""
    return is_stream(recipe) or (recipe.packing and not document.whole)


def _read_corpus(recipe: Recipe, tokenizer: Tokenizer, vocab_size: int) -> Corpus:
    parts: list[Tokens] = []
    learned: list[NDArray[np.bool_]] = []
    documents: list[Piece] = []
    start = 0
    examples = read_examples(recipe.data, paragraphs=recipe.packing)
    while texts := list(itertools.islice(examples, TEXTS_AT_ONCE)):
        for chat, whole in tokenized(texts, tokenizer):
            documents.append(Piece(start, len(chat.tokens), whole))
            parts.append(chat.tokens)
            learned.append(chat.learned)
            start += len(chat.tokens)
    if not documents:
        raise InputError(empty(recipe.data))
    tokens = np.concatenate(parts)
    check_vocabulary(recipe, tokens, vocab_size)
    return Corpus(tokens, np.concatenate(learned), documents)


def check_vocabulary(recipe: Recipe, tokens: Tokens, vocab_size: int) -> None:
    """Raise InputError for a token that the model does not have."""
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise InputError(
            f"data: {recipe.data} becomes token {int(tokens.max())}, and model: {recipe.model} has only "
            f"{vocab_size} tokens. Use the tokenizer the model was trained with."
        )


def tokenized(examples: Sequence[Example], tokenizer: Tokenizer) -> Iterator[tuple[Chat, bool]]:
    """The tokens of each example, and whether it must be read from its beginning."""
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int32)
    texts = [example for example in examples if not example.messages]
    openings = iter(
        tokenizer.encode([example.prompt or example.text for example in texts], True) if texts else []
    )
    completed = [example.text for example in texts if example.prompt]
    completions = iter(tokenizer.encode(completed, False) if completed else [])
    for example in examples:
        if example.messages:
            yield tokenizer.chat(example), True
            continue
        opening = next(openings)
        tokens = np.concatenate([opening, next(completions), end] if example.prompt else [opening, end])
        learned = np.ones(len(tokens), dtype=np.bool_)
        learned[: len(opening) if example.prompt else 0] = False
        yield Chat(tokens, learned), bool(example.prompt) and len(opening) > 0


def _cut(recipe: Recipe, corpus: Corpus, longest: int) -> tuple[list[Piece], int]:
    """The documents in pieces of at most `longest` tokens, and how many documents have none.

    A piece without a token to predict is left out: alone in its row it would make the loss 0 / 0, and among
    others it would change nothing.
    """
    stream = is_stream(recipe)
    pieces: list[Piece] = []
    num_skipped = 0
    for document in corpus.documents:
        if stream:
            lengths = [longest] * (document.length // longest)
        elif _goes_on(recipe, document):
            lengths = [min(longest, document.length - at) for at in range(0, document.length, longest)]
        else:
            lengths = [min(longest, document.length)]
        starts = itertools.accumulate(lengths[:-1], initial=document.start)
        cut = [Piece(start, length, document.whole) for start, length in zip(starts, lengths, strict=False)]
        learnable = [piece for piece in cut if _learned_of(corpus, piece).any()]
        pieces += learnable
        num_skipped += not learnable
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


def _learned_of(corpus: Corpus, piece: Piece) -> NDArray[np.bool_]:
    """Whether each token of the piece is to be predicted, without its first, which nothing predicts."""
    return corpus.learned[piece.start + 1 : piece.start + piece.length]


def _fill(corpus: Corpus, pieces: Sequence[Piece], seq_len: int, padding: int) -> Row:
    """The row of these pieces, filled up with `padding`."""
    input_ids = np.full(seq_len, padding, dtype=np.int64)
    labels = np.full(seq_len, NOT_PREDICTED, dtype=np.int64)
    at = 0
    for piece in pieces:
        end = at + piece.length
        input_ids[at:end] = corpus.tokens[piece.start : piece.start + piece.length]
        labels[at + 1 : end] = np.where(_learned_of(corpus, piece), input_ids[at + 1 : end], NOT_PREDICTED)
        at = end
    lengths = [piece.length for piece in pieces]
    return Row(input_ids, labels, lengths if at == seq_len else [*lengths, seq_len - at])
