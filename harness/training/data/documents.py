"""What a recipe's `data` field names, read as examples: text to learn, with or without a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import InputError, MissingDependency

LONGEST_LINE_BYTES = 2**24
"""16 MiB of text is millions of tokens, more than any row; a longer line is not one example a line."""
FIELDS = "a `text` field, or `prompt` and `completion`"
FILE_SUFFIX = re.compile(
    r"\.(arrow|csv|gz|html|jsonl?|md|parquet|pdf|py|rst|tsv|txt|xml|ya?ml|zip|zst)$", re.I
)
"""Endings no dataset id has: what ends like this was meant as a file."""


class Example(NamedTuple):
    """One document."""

    text: str
    """What the model learns to write."""
    prompt: str = ""
    """What it reads first and is not trained to write."""


def read_examples(data: str, *, paragraphs: bool) -> Iterator[Example]:
    """The examples of a .txt file, a .jsonl file or the train split of a Hugging Face dataset, in order.

    A .txt file is one example, or with `paragraphs` one a paragraph (paragraphs end at a blank line).
    Raises InputError naming `data`, the place and the fix for whatever cannot be read. Yields nothing for
    data without text.
    """
    path = _existing_path(data)
    if path is None:
        return _dataset_examples(data)
    if path.suffix.lower() == ".txt":
        return _text_examples(data, path, paragraphs)
    if path.suffix.lower() == ".jsonl":
        return _jsonl_examples(data, path)
    raise InputError(
        f"data: {data} has the suffix {path.suffix or '(none)'}, which is not read. "
        "Give a .txt file, or a .jsonl file with one JSON object a line."
    )


def _existing_path(data: str) -> Path | None:
    """The file `data` names; None if it reads as a dataset id."""
    try:
        path = Path(data).expanduser()
        if path.is_dir():
            raise InputError(f"data: {data} is a folder. Give one .txt or .jsonl file.")
        if path.is_file():
            return path
        if path.exists():
            raise InputError(f"data: {data} is not a regular file. Give a .txt or .jsonl file.")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user in ~user
        reason = getattr(error, "strerror", None) or error  # an OSError says the path again
        raise InputError(f"data: {data} cannot be read: {reason}. Give a .txt or .jsonl file.") from None
    if FILE_SUFFIX.search(data) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", data):
        raise InputError(
            f"data: {data} does not exist. Give a .txt or .jsonl file (the path is relative to the current "
            f"folder, {Path.cwd()}), a Hugging Face dataset id, or synthetic."
        )
    return None


def _text_examples(data: str, path: Path, paragraphs: bool) -> Iterator[Example]:
    try:
        text = _decoded(path.read_bytes(), f"data: {data}")
    except OSError as error:
        raise InputError(f"data: {data} cannot be read: {error.strerror}.") from None
    for part in re.split(r"\n\s*\n", text) if paragraphs else [text]:
        if part.strip():
            yield Example(part)


def _jsonl_examples(data: str, path: Path) -> Iterator[Example]:
    try:
        # Lines end at \n alone: str.splitlines would also cut at characters JSON allows in a string.
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE_BYTES + 1), b""), start=1):
                where = f"data: {data}, line {number}"
                if len(line) > LONGEST_LINE_BYTES:
                    raise InputError(
                        f"{where} is longer than {LONGEST_LINE_BYTES / 2**20:.0f} MiB. "
                        "Give one JSON object a line, one example each."
                    )
                text = _decoded(line, where)
                if text.strip():
                    yield _example(_json_object(text, where), where)
    except OSError as error:
        raise InputError(f"data: {data} cannot be read: {error.strerror}.") from None


def _dataset_examples(name: str) -> Iterator[Example]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports] (an extra)
        from datasets.exceptions import DatasetsError  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise MissingDependency("datasets", "data", f"data: {name}, a Hugging Face dataset id,") from None
    try:
        dataset = load_dataset(name, split="train")
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise InputError(
            f"data: {name} is neither a file here nor a Hugging Face dataset with a train split that can be "
            f"loaded ({' '.join(str(error).split())[:300]}). Give a .txt or .jsonl file, a dataset id, "
            "or synthetic."
        ) from None
    for number, row in enumerate(dataset):
        yield _example(dict(row), f"data: {name}, row {number}")


def _decoded(content: bytes, where: str) -> str:
    if b"\0" in content:
        raise InputError(f"{where} holds NUL bytes, so it is not text. Give a UTF-8 text file.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it to UTF-8."
        ) from None


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not JSON: {error}. Give one JSON object a line.") from None
    if not isinstance(value, dict):
        raise InputError(
            f"{where} is a JSON {type(value).__name__}, not an object. Give one object a line, with {FIELDS}."
        )
    return value


def _example(fields: dict[str, Any], where: str) -> Example:
    if "text" in fields:
        return Example(_string(fields, "text", where))
    if "prompt" in fields and "completion" in fields:
        return Example(_string(fields, "completion", where), _string(fields, "prompt", where))
    found = ", ".join(repr(name) for name in list(fields)[:8]) or "nothing"
    raise InputError(f"{where} lacks the fields to train on: it has {found}, and needs {FIELDS}.")


def _string(fields: dict[str, Any], field: str, where: str) -> str:
    value = fields[field]
    if not isinstance(value, str):
        raise InputError(f"{where}: `{field}` is {type(value).__name__}, not a string. Give text there.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: `{field}` is not Unicode text ({error.reason}). Repair it.") from None
    return value
