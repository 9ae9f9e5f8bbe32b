"""A tokenizer in the place of one that is not here: a token for each byte, and the model's special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Of conversations."""
NUM_BYTES = 256


def write_tokenizer(config: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and its configuration into `folder`. The special tokens have the numbers that the
    config gives them.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = _number(config.get("eos_token_id"), NUM_BYTES)
    begin = _number(config.get("bos_token_id"), NUM_BYTES + 1)
    special = {BEGIN: begin, END: end} if begin != end else {END: end}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | special
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": next(iter(special)),
        "eos_token": END,
        "pad_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def _number(given: Any, otherwise: int) -> int:
    """A token's number behind those of the bytes, or `otherwise`."""
    first = given[0] if isinstance(given, list) and given else given
    return first if isinstance(first, int) and first >= NUM_BYTES else otherwise
