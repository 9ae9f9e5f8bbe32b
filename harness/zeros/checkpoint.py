"""Checkpoint folders whose weights are zeros, where the user names a folder or in the user's cache."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.architecture import read_config
from harness.errors import InputError
from harness.zeros.weights import MOST_OF_A_FILE as MOST_OF_WEIGHTS
from harness.zeros.weights import write_weights

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
"""The special tokens of a stand-in tokenizer at the beginning and at the end of a text."""
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The chat template of a stand-in tokenizer. It marks the assistant's words as generation."""
NUM_BYTES = 256


def write_byte_tokens(special: Mapping[str, int], folder: Path) -> None:
    """Write tokenizer.json into `folder`: a token for each byte, and the `special` tokens with their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {**special}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))


def write_tokenizer(config: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`: a token for each byte, and special tokens
    with the ids that the model's `config` states.
    """
    end = _special_id(config.get("eos_token_id"), NUM_BYTES)
    begin = _special_id(config.get("bos_token_id"), NUM_BYTES + 1)
    special = {BEGIN: begin, END: end} if begin != end else {END: end}
    write_byte_tokens(special, folder)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": next(iter(special)),
        "eos_token": END,
        "pad_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _special_id(stated: Any, default: int) -> int:
    """The token id that a config states, or the first of a list of them; `default` where it states none, or
    one that a byte has."""
    first = stated[0] if isinstance(stated, list) and stated else stated
    return first if isinstance(first, int) and first >= NUM_BYTES else default


TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
"""The files of which any shows that a checkpoint has a tokenizer."""
MOST_OF_A_FILE = 2**28
"""The largest file that is copied from the folder of a config, in bytes."""
OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""The endings of files of weights, which are not copied."""


def write_checkpoint(config: Path, folder: Path) -> tuple[int, bool]:
    """Write a checkpoint of zeros for the model that the file `config` describes into a new `folder`.

    The other files in the folder of a config.json, such as a tokenizer's, are copied; where none is a
    tokenizer's, a tokenizer of bytes is written. Returns the bytes of the weights, and whether the tokenizer
    is such a stand-in. Raises InputError for a config that cannot be read, for a model that cannot be built,
    and for a folder that is not empty or not writable.
    """
    described = read_config(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out {folder}: it is not empty. Give a new folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size_bytes = write_weights(described, folder)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        for path in config.parent.iterdir() if config.name == "config.json" else ():
            is_written = path.name == config.name or path.name.endswith(OF_WEIGHTS)
            if path.is_file() and not is_written and path.stat().st_size <= MOST_OF_A_FILE:
                shutil.copyfile(path, folder / path.name)
        stands_in = not any((folder / name).exists() for name in TOKENIZER)
        if stands_in:
            write_tokenizer(described, folder)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}. Give a folder that can be written.") from None
    return size_bytes, stands_in


def stand_in_folder(config: Path) -> Path:
    """The folder in the user's cache that holds the checkpoint of zeros for the file `config`. It is written
    the first time. Raises InputError as `write_checkpoint` does.
    """
    told = config.read_bytes() + str(config.absolute()).encode() + str(MOST_OF_WEIGHTS).encode()
    key = hashlib.sha256(told).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "harness" / "zeros" / key
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=folder.parent))
    try:
        write_checkpoint(config, partial)
        partial.rename(folder)
    except OSError:  # another process may have been quicker
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
