"""Reads pairs of answers, answers marked good or bad, and pairs of texts that belong together; tokenizes them
as TRL and sentence-transformers do, and lays them into rows of seq_len tokens.

The fields and the tokens are those of TRL's DPOTrainer, KTOTrainer and RewardTrainer (_prepare_dataset and
the collators of trl/trainer/*_trainer.py), whose defaults also decide what is left out and what is cut off.
task: orpo has DPOTrainer's.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.data.documents import Read, empty, read_examples
from harness.data.examples import messages_of, string_of, tools_of
from harness.data.rows import NOT_PREDICTED, TEXTS_AT_ONCE, DataSummary, Row, Rows, check_vocabulary
from harness.data.tokenizer import Tokenizer, Tokens
from harness.errors import InputError
from harness.recipe import Recipe

Text = str | tuple[Mapping[str, Any], ...]
"""Text, or the messages of a conversation."""


class Pair(NamedTuple):
    """One example of a task that compares."""

    prompt: Text
    sides: tuple[Text, ...]
    """The chosen and the rejected answer; or the marked answer alone; or two texts that belong together."""
    good: bool
    """Whether a marked answer is good; else True."""
    tools: tuple[Any, ...]
    """JSON schemas of the functions that the assistant may call."""
    where: str
    """The file and line, for error messages."""


class Written(NamedTuple):
    """One example as tokens."""

    sides: tuple[Tokens, ...]
    """The tokens of each side, with the prompt's before them."""
    prompt: int
    """How many tokens of the prompt all sides begin with; 0 where a row is learned as a whole."""
    good: bool
    """Whether a marked answer is good; else True."""


def _columns(recipe: Recipe) -> tuple[str, ...]:
    """The fields that a row must have. A row with two answers may have a `prompt` too."""
    if recipe.embeds:
        return ("anchor", "positive")
    return ("prompt", "completion", "label") if recipe.unpaired else ("chosen", "rejected")


def pair_reader(recipe: Recipe) -> Read[Pair]:
    """The function that reads a row's fields as an example of the recipe's task.

    It raises InputError that names the place, the column that is missing or wrong, and the fix.
    """
    needed = _columns(recipe)

    def read(fields: Mapping[str, Any], where: str) -> Pair:
        if missing := [name for name in needed if name not in fields]:
            found = ", ".join(repr(name) for name in list(fields)[:8]) or "nothing"
            raise InputError(
                f"{where} lacks the column `{missing[0]}`: it has {found}, and task: {recipe.task} needs "
                f"{' and '.join(f'`{name}`' for name in needed)}."
            )
        if recipe.embeds and "negative" in fields:
            raise InputError(
                f"{where} has `negative`, and a text that does not belong to its anchor is not read yet. "
                "Leave the column out: the other anchors' texts are told apart from it."
            )
        if not isinstance(fields.get("label", True), bool) and recipe.unpaired:
            raise InputError(f"{where}: `label` is {fields['label']!r:.40}. Give true or false.")
        columns = needed if recipe.embeds else dict.fromkeys(("prompt", *needed[:2]))
        names = [name for name in columns if name in fields]
        chats = [isinstance(fields[name], list) for name in names]
        if any(chats) and (recipe.embeds or not all(chats)):
            of_text = names[chats.index(recipe.embeds)]
            raise InputError(
                f"{where}: `{of_text}` is {type(fields[of_text]).__name__}. Give "
                f"{' and '.join(f'`{name}`' for name in names)} as text"
                f"{'' if recipe.embeds else ', or all of them as messages'}."
            )
        one = messages_of if any(chats) else _text
        texts = {name: one(fields[name], name, where) for name in names}
        prompt = texts.pop("prompt", None) if not recipe.embeds else ""
        sides = tuple(texts.values())
        if prompt is None:
            at = 0 if recipe.scores else _shared_beginning(*sides)
            prompt, sides = sides[0][:at], tuple(side[at:] for side in sides)
        return Pair(prompt, sides, bool(fields.get("label", True)), tools_of(fields, where), where)

    return read


def _text(value: Any, name: str, where: str) -> str:
    return string_of({name: value}, name, where)


def _shared_beginning(chosen: Text, rejected: Text) -> int:
    """Where the prompt ends that both answers begin with, as in trl/data_utils.py, extract_prompt: before a
    space between prompt and answer; and if one answer is the beginning of the other, before its last part."""
    shortest = min(len(chosen), len(rejected))
    at = next((n for n in range(shortest) if chosen[n] != rejected[n]), None)
    if at is None:
        return max(0, shortest - 1)
    return at - 1 if at and chosen[at - 1] == " " else at


def written_pairs(
    recipe: Recipe, pairs: Sequence[Pair], tokenizer: Tokenizer, most: int | None = None
) -> list[Written]:
    """The tokens of each example. A text that is embedded has at most `most`."""
    if recipe.embeds:
        texts = iter(tokenizer.alone([str(side) for pair in pairs for side in pair.sides], most))
        return [Written((next(texts), next(texts)), 0, True) for _ in pairs]
    plain = [
        text
        for pair in pairs
        if isinstance(pair.prompt, str)
        for text in (pair.prompt, *(pair.prompt + str(side) for side in pair.sides))
    ]
    opened = iter(tokenizer.encode(plain, True) if plain else [])
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int32)
    written: list[Written] = []
    for pair in pairs:
        if isinstance(pair.prompt, str):
            prompt = next(opened)
            sides = tuple(np.concatenate([next(opened), end]) for _ in pair.sides)
        else:
            about = pair.tools, False, pair.where
            prompt = tokenizer.turns(pair.prompt, pair.tools, True, pair.where) if pair.prompt else end[:0]
            sides = tuple(tokenizer.turns((*pair.prompt, *side), *about) for side in pair.sides)  # type: ignore[misc]
        shared = 0 if recipe.scores else min(_shared_tokens(prompt, side) for side in sides)
        written.append(Written(sides, shared, pair.good))
    return written


def _shared_tokens(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    shortest = min(len(one), len(other))
    differ = np.flatnonzero(one[:shortest] != other[:shortest])
    return int(differ[0]) if len(differ) else shortest


def learned_from(recipe: Recipe, pair: Written) -> bool:
    """Whether a run learns from it: rows that are scored are never cut, and others have a token to learn."""
    lengths = [len(side) for side in pair.sides]
    if recipe.scores:
        return max(lengths) <= recipe.seq_len
    first = 0 if recipe.embeds else max(1, pair.prompt)  # nothing predicts a row's first token
    return all(first < min(length, recipe.seq_len) for length in lengths)


def all_pairs(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[Written]:
    """The examples of the recipe's data, in order."""
    examples = read_examples(recipe.data, paragraphs=False, read=pair_reader(recipe))
    while pairs := list(itertools.islice(examples, TEXTS_AT_ONCE)):
        yield from written_pairs(recipe, pairs, tokenizer, recipe.seq_len)


def pair_rows(recipe: Recipe, tokenizer: Tokenizer, vocab_size: int) -> Rows:
    """The rows of a file or a data set, shuffled again for each epoch. Each micro batch has the rows of the
    first sides, and behind them those of the second sides.

    Raises InputError if the data cannot be read, has tokens beyond `vocab_size` or nothing to learn from.
    """
    examples = list(all_pairs(recipe, tokenizer))
    if not examples:
        raise InputError(empty(recipe.data))
    check_vocabulary(recipe, np.concatenate([side for pair in examples for side in pair.sides]), vocab_size)
    pairs = [pair for pair in examples if learned_from(recipe, pair)]
    if not pairs:
        raise InputError(
            f"data: {recipe.data} leaves nothing to learn from: none of its {len(examples)} examples fits "
            f"seq_len: {recipe.seq_len} with an answer to learn. Give shorter prompts, or raise seq_len."
        )
    size, padding = recipe.micro_batch_size, tokenizer.padding or 0
    epoch, order = -1, np.empty(0, dtype=np.int64)

    def at(number: int) -> tuple[Written, int]:
        """The example of the row at a place of the sequence, and which of its sides the row is."""
        nonlocal epoch, order
        micro_batch, within = divmod(number, recipe.rows)
        place = micro_batch * size + within % size
        if place // len(pairs) != epoch:
            epoch = place // len(pairs)
            order = np.random.default_rng((recipe.seed, epoch)).permutation(len(pairs))
        return pairs[int(order[place % len(pairs)])], within // size

    def draw(number: int) -> Row:
        pair, side = at(number)
        return _row(pair.sides[side], pair.prompt, pair.good)

    def mismatched(prompt_at: int, answer_at: int) -> Row:
        prompt, answer = at(prompt_at)[0], at(answer_at)[0]
        tokens = np.concatenate([prompt.sides[0][: prompt.prompt], answer.sides[0][answer.prompt :]])
        return _row(tokens, prompt.prompt, answer.good)

    def _row(tokens: Tokens, prompt: int, good: bool) -> Row:
        length = min(len(tokens), recipe.seq_len)
        input_ids = np.full(recipe.seq_len, padding, dtype=np.int64)
        input_ids[:length] = tokens[:length]
        labels = np.full(recipe.seq_len, NOT_PREDICTED, dtype=np.int64)
        learned = slice(max(1, prompt), length)
        labels[learned] = input_ids[learned]
        return Row(input_ids, labels, [n for n in (length, recipe.seq_len - length) if n], good)

    def lengths(number: int) -> list[int]:
        return draw(number).document_lengths

    summary = _summary(recipe, examples, pairs)
    return Rows(draw, lengths, summary.rows, len(examples) - len(pairs), summary, mismatched, padding)


def _summary(recipe: Recipe, examples: Sequence[Written], pairs: Sequence[Written]) -> DataSummary:
    """How all examples, and `pairs`, those that are learned from, fit into rows. Every side is a document."""
    lengths = np.array([len(side) for pair in examples for side in pair.sides], dtype=np.int64)
    kept = np.array([len(side) for pair in pairs for side in pair.sides], dtype=np.int64)
    read = np.minimum(kept, recipe.seq_len)
    prompts = np.array([max(1, pair.prompt) for pair in pairs for _ in pair.sides], dtype=np.int64)
    in_rows = len(kept) * recipe.seq_len
    return DataSummary(
        documents=len(lengths),
        rows=len(kept),
        longest_document_tokens=int(lengths.max()),
        median_document_tokens=int(np.median(lengths)),
        documents_cut=int((kept > recipe.seq_len).sum()),
        tokens_cut=int((kept - read).sum()),
        padding_share=1 - int(read.sum()) / in_rows,
        learned_share=0.0 if recipe.by_row else int((read - prompts).sum()) / in_rows,
    )
