"""Checkpoint folders whose weights are zeros: one where the user wants it, and those of the cache."""

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
from harness.zeros.weights import write_weights

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Of conversations."""
NUM_BYTES = 256


def write_byte_tokens(special: Mapping[str, int], folder: Path) -> None:
    """tokenizer.json in `folder`: a token for each byte, and the `special` ones with their numbers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {**special}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    made.save(str(folder / "tokenizer.json"))


def write_tokenizer(config: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and its configuration into `folder`. The special tokens have the numbers that the
    config gives them.
    """
    end = _number(config.get("eos_token_id"), NUM_BYTES)
    begin = _number(config.get("bos_token_id"), NUM_BYTES + 1)
    special = {BEGIN: begin, END: end} if begin != end else {END: end}
    write_byte_tokens(special, folder)
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


WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
"""Any of these beside a config: it has a tokenizer."""
MOST_OF_A_FILE = 2**28
"""Bytes of a file that is copied from beside a config."""
OF_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def write_checkpoint(config: Path, folder: Path) -> tuple[int, bool]:
    """Write a checkpoint of zeros for the model that the file `config` describes into a new `folder`.

    What lies beside a config of a checkpoint, its tokenizer for one, is copied; without one a tokenizer of
    bytes is written. Returns the bytes of the weights, and whether the tokenizer is such a stand-in. Raises
    InputError for a config that cannot be read or built, and for a folder that is not empty or not writable.
    """
    described = read_config(config)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--out {folder}: it is not empty. Give a new folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size_bytes = write_weights(described, folder / WEIGHTS)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        if config.name == "config.json":
            _copy_what_is_beside(config, folder)
        stands_in = not any((folder / name).exists() for name in TOKENIZER)
        if stands_in:
            write_tokenizer(described, folder)
    except OSError as error:
        raise InputError(f"--out {folder}: {error.strerror}. Give a folder that can be written.") from None
    return size_bytes, stands_in


def _copy_what_is_beside(config: Path, folder: Path) -> None:
    for path in config.parent.iterdir():
        known = path.name == config.name or path.name.endswith(OF_WEIGHTS)
        if path.is_file() and not known and path.stat().st_size <= MOST_OF_A_FILE:
            shutil.copyfile(path, folder / path.name)


def stand_in_folder(config: Path) -> Path:
    """The folder in the user's cache with the checkpoint of zeros of this config, written the first time.

    Raises InputError as `write_checkpoint` does.
    """
    key = hashlib.sha256(config.read_bytes() + str(config.absolute()).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(base) / "harness" / "zeros" / key
    if (folder / WEIGHTS).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=folder.parent))
    try:
        write_checkpoint(config, made)
        made.rename(folder)
    except OSError:  # another process was quicker
        if not (folder / WEIGHTS).exists():
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
