"""What a recipe of torchtune is given in place of downloads: a tokenizer, rows of packed documents, weights.

Its configs name each as a `_component_`; benchmarks/time/torchtune.py does.
"""

import random
from typing import Any, NamedTuple

import torch
from torchtune.datasets import PackedDataset
from torchtune.models.llama3_2 import llama3_2_3b

WORDS = 128_000
SHORTEST, LONGEST = 40, 256
"""Tokens of a document, every length alike. torchtune's own rows are of Alpaca, nearly all of whose documents
have fewer than 256 (tutorials/prepare_dataset.md in Lightning-AI/litgpt); nobody publishes more."""
DOCUMENTS = 240


class Tokenizer(NamedTuple):
    """As much of a tokenizer as a packed data set asks for. `path`, of the config, is none of a file."""

    max_seq_len: int
    path: str = ""
    pad_id: int = 0


def documents(tokenizer: Tokenizer, packed: bool, **_: Any) -> PackedDataset:
    """Random documents in torchtune's own packed rows."""
    draw = random.Random(0)
    lengths = [draw.randint(SHORTEST, LONGEST) for _ in range(DOCUMENTS)]
    tokens = [[draw.randrange(WORDS) for _ in range(length)] for length in lengths]
    return PackedDataset(
        [{"tokens": each, "labels": each} for each in tokens], max_seq_len=tokenizer.max_seq_len
    )


class Weights:
    """A checkpointer that reads no file: the weights of Llama-3.2-3B, whatever they are."""

    def __init__(self, **_: Any) -> None:
        pass

    def load_checkpoint(self, **_: Any) -> dict[str, Any]:
        with torch.device("meta"):
            weights = llama3_2_3b().state_dict()
        dtype = torch.bfloat16
        return {"model": {name: torch.empty(each.shape, dtype=dtype) for name, each in weights.items()}}

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        """Nothing was learned."""
