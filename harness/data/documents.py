"""Reads the examples of a recipe's `data`: files of several kinds, and data sets of the Hub."""

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from harness.data.examples import read_example
from harness.errors import InputError, MissingDependency
from harness.system import hub_or_cache, is_array, is_object, open_regular, read_whole

LONGEST_LINE_BYTES = 2**24
"""The longest line of a .jsonl file: 16 MiB of text is millions of tokens, and no longer one example."""
LARGEST_BYTES = {".json": 2**28, ".txt": 2**30}
"""The largest files of the two kinds that are read at once. A .json file is one value, which takes some ten
times the file's size in memory."""
ROWS_AT_ONCE = 1000
"""Rows of a parquet file that are read at a time."""
READ = ".jsonl (a JSON object a line), .json (a list of objects), .parquet or .txt file"
"""The kinds of file that are read, for messages."""
FILE_SUFFIX = re.compile(
    r"\.(arrow|csv|gz|html|jsonl?|ndjson|md|parquet|pdf|py|rst|tsv|txt|xml|ya?ml|zip|zst)$", re.I
)
"""Endings of files, which no id of a data set has."""
T = TypeVar("T")
Read = Callable[[Mapping[str, Any], str], T]
"""(a row's fields, where the row is) -> its example, an Example or a Pair."""


def read_examples(data: str, *, paragraphs: bool, read: Read[T] = read_example) -> Iterator[T]:
    """The examples of a file or of the train split of a Hugging Face data set, in order, each made by `read`.

    A .txt file is one example, or with `paragraphs` one for each paragraph (paragraphs end at a blank line).
    Raises InputError naming `data`, the place and the fix for what cannot be read. Yields nothing for data
    without text.
    """
    path = existing_path(data)
    return _dataset_examples(data, read) if path is None else file_examples(data, path, paragraphs, read)


def empty(data: str) -> str:
    """The message about data without an example."""
    return f"data: {data} is empty. Give data with text in it, or data: synthetic."


def no_chat_template(data: str, model: str) -> str:
    """The message about conversations for a checkpoint without a chat template."""
    return (
        f"data: {data} holds conversations, and model: {model} has no chat template to write them with. Use "
        "the instruction-tuned checkpoint, add its chat_template.jinja to the folder, or give `prompt` and "
        "`completion` instead of messages."
    )


def file_examples(data: str, path: Path, paragraphs: bool, read: Read[T] = read_example) -> Iterator[T]:
    """The examples of the file at `path`, as read_examples reads them."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return _text_examples(data, path, paragraphs, read)
    if suffix in (".jsonl", ".ndjson"):
        return _jsonl_examples(data, path, read)
    if suffix == ".json":
        return _json_examples(data, path, read)
    if suffix == ".parquet":
        return _parquet_examples(data, path, read)
    raise InputError(
        f"data: {data} has the suffix {path.suffix or '(none)'}, which is not read. Give a {READ}."
    )


def existing_path(data: str) -> Path | None:
    """The file that `data` names; None if `data` looks like the id of a data set. Raises InputError for a
    folder, an irregular file and a name that is neither."""
    try:
        path = Path(data).expanduser()
        if path.is_dir():
            raise InputError(f"data: {data} is a folder. Give one {READ}.")
        if path.is_file():
            return path
        if path.exists():
            raise InputError(f"data: {data} is not a regular file. Give a {READ}.")
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user in ~user
        reason = getattr(error, "strerror", None) or error  # an OSError says the path again
        raise InputError(f"data: {data} cannot be read: {reason}. Give a {READ}.") from None
    if FILE_SUFFIX.search(data) or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", data):
        raise InputError(
            f"data: {data} does not exist. Give a {READ} (the path is relative to the current "
            f"folder, {Path.cwd()}), a Hugging Face dataset id, or synthetic."
        )
    return None


def _whole_text(data: str, path: Path) -> str:
    try:
        content = read_whole(path, LARGEST_BYTES[path.suffix.lower()])
    except OSError as error:
        fix = " Write it as .jsonl, one JSON object a line." if error.errno == errno.EFBIG else ""
        raise InputError(f"data: {data} cannot be read: {error.strerror}.{fix}") from None
    return _decoded(content, f"data: {data}")


def _text_examples(data: str, path: Path, paragraphs: bool, read: Read[T]) -> Iterator[T]:
    text = _whole_text(data, path)
    for part in re.split(r"\n\s*\n", text) if paragraphs else [text]:
        if part.strip():
            yield read({"text": part}, f"data: {data}")


def _jsonl_examples(data: str, path: Path, read: Read[T]) -> Iterator[T]:
    try:
        # Lines end at \n alone: str.splitlines would also cut at characters JSON allows in a string.
        with open_regular(path) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE_BYTES + 1), b""), start=1):
                where = f"data: {data}, line {number}"
                if len(line) > LONGEST_LINE_BYTES:
                    raise InputError(
                        f"{where} is longer than {LONGEST_LINE_BYTES / 2**20:.0f} MiB. "
                        "Give one JSON object a line, one example each."
                    )
                text = _decoded(line, where)
                if text.strip():
                    yield read(_json_object(text, where), where)
    except OSError as error:
        raise InputError(f"data: {data} cannot be read: {error.strerror}.") from None


def _json_examples(data: str, path: Path, read: Read[T]) -> Iterator[T]:
    try:
        rows = json.loads(_whole_text(data, path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"data: {data} is not JSON: {error}. JSON lines are called .jsonl.") from None
    if not is_array(rows):
        raise InputError(f"data: {data} is a JSON {type(rows).__name__}, not a list of objects.")
    for number, row in enumerate(rows, start=1):
        where = f"data: {data}, example {number}"
        if not is_object(row):
            raise InputError(f"{where} is a JSON {type(row).__name__}, not an object.")
        yield read(row, where)


def _parquet_examples(data: str, path: Path, read: Read[T]) -> Iterator[T]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError:
        raise MissingDependency("pyarrow", "data", f"data: {data}, a parquet file,") from None
    number = 0
    try:
        with open_regular(path) as file, parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield read(row, f"data: {data}, row {number}")
    except (ArrowException, OSError) as error:
        raise InputError(
            f"data: {data} is not a parquet file that can be read ({' '.join(str(error).split())[:200]}). "
            "Write it again."
        ) from None


def _dataset_examples(name: str, read: Read[T]) -> Iterator[T]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError:
        raise MissingDependency("datasets", "data", f"data: {name}, a Hugging Face dataset id,") from None
    with hub_or_cache(name) as unreached:
        try:
            dataset = load_dataset(name, split="train")
        except (OSError, ValueError, RuntimeError, DatasetsError) as error:
            why = unreached or " ".join(str(error).split())[:300]
            raise InputError(
                f"data: {name} is neither a file here nor a Hugging Face dataset with a train split that can "
                f"be loaded ({why}). Give a {READ}, a dataset id, or synthetic."
            ) from None
    for number, row in enumerate(dataset):
        yield read(dict(row), f"data: {name}, row {number}")


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
    if not is_object(value):
        raise InputError(f"{where} is a JSON {type(value).__name__}, not an object. Give one object a line.")
    return value
