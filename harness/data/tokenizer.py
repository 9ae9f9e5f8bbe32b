"""Tokenizes text: by the checkpoint's own tokenizer, or with one token for each byte for random weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.data.chat import Chat, plain_chat, templated_chat, templated_turns
from harness.data.documents import no_chat_template
from harness.data.examples import Example
from harness.errors import InputError
from harness.recipe import Recipe
from harness.system import hub_or_cache

Tokens = NDArray[np.int32]
NUM_BYTES = 256


@dataclass(frozen=True)
class Tokenizer:
    """How text becomes tokens for one model."""

    encode: Callable[[Sequence[str], bool], list[Tokens]]
    """(texts, opening) -> the tokens of each text, of shape (n,). A text that is `opening` begins a document,
    and has the beginning-of-sequence token in front, if the model expects one. No text has an end token."""
    end_of_document: int | None
    """The token that ends a document; None if the vocabulary has none."""
    chat: Callable[[Example], Chat]
    """The tokens of a conversation, with the beginning and the end that the model expects."""
    turns: Callable[[Sequence[Mapping[str, Any]], Sequence[Any], bool, str], Tokens]
    """(messages, tools, prompted, where) -> the tokens of the messages, with the generation prompt behind
    them if `prompted`. `where` the messages are is for error messages."""
    alone: Callable[[Sequence[str], int | None], list[Tokens]]
    """(texts, most) -> the tokens of each text as sentence-transformers tokenizes it for an encoder: at most
    `most` of them."""
    padding: int | None
    """The token that fills rows; None if the vocabulary has none."""


def build_tokenizer(recipe: Recipe, *, vocab_size: int, tokenizer_source: str | None) -> Tokenizer:
    """The tokenizer of a recipe: `tokenizer_source`'s for pretrained weights, one of bytes for random ones.

    `tokenizer_source` is a checkpoint folder or a Hugging Face id. Raises InputError if it has no tokenizer,
    or if a vocabulary of `vocab_size` has no room for 256 bytes.
    """
    if recipe.weights == "random":
        return byte_tokenizer(recipe, vocab_size)
    if tokenizer_source is None:
        raise ValueError("pretrained weights need the tokenizer_source they were trained with")
    return _checkpoint_tokenizer(recipe, tokenizer_source)


def byte_tokenizer(recipe: Recipe, vocab_size: int) -> Tokenizer:
    """A tokenizer with one token for each byte. Raises InputError for a vocabulary of fewer than 256."""
    if vocab_size < NUM_BYTES:
        raise InputError(
            f"data: {recipe.data} is read as bytes, which need a vocabulary of {NUM_BYTES} tokens, and "
            f"model: {recipe.model} has {vocab_size}. Set data: synthetic, or another model."
        )

    def encode(texts: Sequence[str], opening: bool) -> list[Tokens]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    def chat(example: Example) -> Chat:
        return written(plain_chat(example))

    def turns(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompted: bool, where: str
    ) -> Tokens:
        prompt = [("<|im_start|>assistant\n", False)] if prompted else []
        return written(plain_chat(Example(messages=tuple(messages))) + prompt).tokens

    def alone(texts: Sequence[str], most: int | None) -> list[Tokens]:
        return [tokens[:most] for tokens in encode(texts, True)]

    def written(pieces: list[tuple[str, bool]]) -> Chat:
        parts = encode([text for text, _ in pieces], False)
        learned = [
            np.full(len(part), is_learned) for part, (_, is_learned) in zip(parts, pieces, strict=True)
        ]
        return Chat(np.concatenate(parts), np.concatenate(learned))

    end = NUM_BYTES if vocab_size > NUM_BYTES else None
    return Tokenizer(encode, end, chat, turns, alone, end)


def _checkpoint_tokenizer(recipe: Recipe, source: str) -> Tokenizer:
    from transformers import AutoTokenizer

    with hub_or_cache(source) as unreached:
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=recipe.trust_remote_code)
        except Exception as error:  # for damaged files, transformers raises whatever its own code runs into
            why = unreached or " ".join(str(error).split())[:300]
            raise InputError(
                f"model: {source} gives no tokenizer for weights: pretrained ({why}). "
                "Add its tokenizer files, or set data: synthetic."
            ) from None
    end = tokenizer.eos_token_id

    def encode(texts: Sequence[str], opening: bool) -> list[Tokens]:
        # verbose=False: no warning about a text longer than the model's context, which is cut later
        batch = tokenizer(list(texts), add_special_tokens=opening, return_attention_mask=False, verbose=False)
        # some tokenizers put an end token behind every text; here only a document's end has it
        ids = [row[:-1] if opening and row and row[-1] == end else row for row in batch["input_ids"]]
        return [np.asarray(row, dtype=np.int32) for row in ids]

    # transformers builds some tokenizers (GPT-2's) empty where the folder lacks their files
    if not len(encode(["text"], False)[0]):
        raise InputError(
            f"model: {source} has a tokenizer without a vocabulary. Add its tokenizer files "
            "(tokenizer.json), or set data: synthetic."
        )

    def alone(texts: Sequence[str], most: int | None) -> list[Tokens]:
        cut: Any = {"truncation": most is not None, "max_length": most}
        batch = tokenizer(list(texts), return_attention_mask=False, verbose=False, **cut)
        return [np.asarray(row, dtype=np.int32) for row in batch["input_ids"]]

    def turns(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompted: bool, where: str
    ) -> Tokens:
        if not tokenizer.chat_template:
            raise InputError(no_chat_template(recipe.data, source))
        return templated_turns(tokenizer, messages, tools, prompted, where)

    def chat(example: Example) -> Chat:
        if not tokenizer.chat_template:
            raise InputError(no_chat_template(recipe.data, source))
        if not tokenizer.is_fast:
            raise InputError(
                f"model: {source} has a tokenizer that does not say which characters a token stands for, so "
                "the assistant's words cannot be told apart. Add its tokenizer.json, or give `prompt` and "
                "`completion` instead of messages."
            )
        return templated_chat(tokenizer, example)

    padding = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Tokenizer(encode, end, chat, turns, alone, padding)
