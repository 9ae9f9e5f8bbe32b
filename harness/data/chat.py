"""Tokenizes conversations by a checkpoint's chat template, and marks the tokens that the assistant wrote."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.data.examples import Example
from harness.errors import InputError

Span = tuple[int, int]
"""A part of a rendered conversation: its first character, and the one behind its last."""
_GENERATION = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
"""The mark with which a template begins what the assistant writes (transformers,
utils/chat_template_utils.py)."""


class Chat(NamedTuple):
    """A conversation as one document. Both arrays have shape (n,)."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Whether each token is to be learned, as what the assistant wrote is."""


def plain_chat(example: Example) -> list[tuple[str, bool]]:
    """The pieces of the conversation in ChatML form, and whether each is learned: for random weights, which
    have no template of their own.
    """
    pieces: list[tuple[str, bool]] = []
    for number, message in enumerate(example.messages):
        learned = message["role"] == "assistant" and number >= example.num_given
        content = message["content"] or str(message.get("tool_calls", ""))
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        pieces.append((f"{content}<|im_end|>", learned))
        pieces.append(("\n", False))
    return pieces


def templated_turns(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], prompted: bool, where: str
) -> NDArray[np.int32]:
    """The tokens of messages by the chat template, with the generation prompt behind them if `prompted`.
    Raises InputError, beginning with `where`, for messages that the template cannot render."""
    try:
        encoding = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=list(tools) or None,
            add_generation_prompt=prompted,
            return_dict=True,
        )
    except Exception as error:
        raise _unrendered(where, error) from None
    return np.asarray(encoding["input_ids"], dtype=np.int32)


def _unrendered(where: str, error: Exception) -> InputError:
    """The error to raise where a template fails. It is a program: it raises jinja's errors and Python's."""
    return InputError(
        f"{where}: the chat template cannot render it ({' '.join(str(error).split())[:300]}). "
        "Mend the conversation, or leave it out."
    )


def templated_chat(tokenizer: Any, example: Example) -> Chat:
    """The conversation by the chat template of `tokenizer`, a fast one of transformers.

    Learned are the parts that the template marks as generated, or else the assistant's turns, each from
    behind the generation prompt to the end of the turn. Raises InputError for a conversation that the
    template cannot render, or whose turns cannot be told apart.
    """
    tools = list(example.tools) or None
    messages = [dict(message) for message in example.messages]
    options: dict[str, Any] = {"tools": tools, "tokenizer_kwargs": {"return_offsets_mapping": True}}

    def rendered(count: int, prompted: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=prompted
        )
        return str(text)

    try:
        marked = bool(_GENERATION.search(tokenizer.get_chat_template(None, tools)))
        whole = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=marked, **options
        )
        text = rendered(len(messages), False)
        read_only = len(rendered(example.num_given, False)) if example.num_given else 0  # characters
        spans: Sequence[Span] = [] if marked else _assistant_spans(example, text, rendered)
    except InputError:
        raise
    except Exception as error:
        raise _unrendered(example.where, error) from None
    starts = np.array([start for start, _ in whole["offset_mapping"]], dtype=np.int64)
    if marked:
        learned = np.array(whole["assistant_masks"], dtype=np.bool_)
    else:
        learned = np.zeros(len(starts), dtype=np.bool_)
        for start, end in spans:
            learned |= (starts >= start) & (starts < end)
    return Chat(np.asarray(whole["input_ids"], dtype=np.int32), learned & (starts >= read_only))


def _assistant_spans(example: Example, text: str, rendered: Callable[[int, bool], str]) -> Sequence[Span]:
    """Where the assistant's turns are in `text`, the whole conversation. `rendered(n, prompted)` is the text
    of its first n messages, with the generation prompt behind them if `prompted`.

    A template may render a turn differently once others follow it (without what the assistant thought). Then
    the turn's end is found by its words and by what the template puts behind them.
    """
    spans: list[Span] = []
    for number, message in enumerate(example.messages):
        if message["role"] != "assistant" or number < example.num_given:
            continue
        before = rendered(number, True) if number else ""
        if not text.startswith(before):
            before = rendered(number, False) if number else ""
        through = rendered(number + 1, False)
        if text.startswith(before) and text.startswith(through):
            spans.append((len(before), len(through)))
            continue
        words = str(message["content"] or "").strip()
        last, closing = through.rfind(words), through[through.rfind(words) + len(words) :]
        at = text.find(words + closing, len(before))
        if not words or last < 0 or not text.startswith(before) or at < 0:
            raise InputError(
                f"{example.where}: the chat template writes the assistant's turn {number + 1} otherwise once "
                "others follow it, so what it wrote cannot be told apart. End the conversation with that "
                "turn, or mark what is generated in the template by {% generation %}."
            )
        spans.append((len(before), at + len(words) + len(closing)))
    return spans
