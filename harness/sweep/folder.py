"""The folder of a sweep: one file cells/<key>.json for each finished cell, so that no cell is answered twice.

A cell's key is a digest of all that its answer depends on. A file that does not hold the outcome of its key
is ignored, and the cell is answered again. Imports no torch.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from harness.architecture import MAX_CONFIG_BYTES, config_here
from harness.errors import InputError
from harness.hardware import device_names, find_hardware
from harness.run_folder import FILES
from harness.step_profile import MAX_FILE_BYTES, MAX_VALUES
from harness.sweep.cell import Outcome
from harness.sweep.plan import Cell, Kind, Plan
from harness.system import (
    PACKAGE,
    PACKAGES,
    SETTINGS,
    FolderLock,
    installed_version,
    is_object,
    make_folder,
    parse_json,
    read_whole,
    write_whole,
)

SCHEMA_VERSION = 1
SWEEPS = Path("profiles/sweeps")
KEPT = ("ok", "out_of_memory")
"""Outcomes that are not asked for again. A refusal or a failure may have had a temporary reason."""


def default_folder(plan: Plan) -> Path:
    """profiles/sweeps/<recipe>-<kind>-<fields>-<digest>, the same whenever the same question is asked.

    The fields' values are not a part of it: with other values of the same fields, kept cells are used again.
    """
    question = {"base": plan.base, "hardware": plan.hardware, "fields": list(plan.axes), "grid": plan.grid}
    name = re.sub(r"[^A-Za-z0-9._-]", "-", "-".join([plan.name, plan.kind, *plan.axes]))
    return SWEEPS / f"{name[:100]}-{_digest(question)[:6]}"


def cell_key(
    cell: Cell, kind: Kind, device: str | None = None, elsewhere: Mapping[str, Any] | None = None
) -> str:
    """32 hexadecimal digits of all that the answer depends on."""
    return _digest(cell_facts(cell, kind, device, elsewhere))


def cell_facts(
    cell: Cell, kind: Kind, device: str | None = None, elsewhere: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All that the answer depends on: the recipe and the model's config, the hardware, the versions of the
    code and the libraries, the allocator's settings; for a measurement also this machine, or the one that
    `elsewhere` describes."""
    recipe = cell.recipe
    facts: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "recipe": cell.changes if recipe is None else recipe.model_dump(mode="json"),
        "model": None if recipe is None else _content_digest(recipe.model),
        "code": _code_digest(),
    }
    if cell.hardware is not None:
        facts["hardware"] = repr(find_hardware(cell.hardware))  # with its calibration
    if kind == "measured":
        facts["machine"] = _machine(device) if elsewhere is None else {"device": device, **elsewhere}
    if kind != "napkin":
        facts["versions"] = {name: installed_version(name) for name in PACKAGES}
        facts["settings"] = {name: os.environ.get(name) for name in SETTINGS}
    return facts


def read_outcome(folder: Path, key: str) -> Outcome | None:
    """The kept outcome of the cell `key`; None when there is none, or its file is damaged."""
    path = cell_path(folder, key)
    try:
        document = parse_json(read_whole(path, MAX_FILE_BYTES), MAX_VALUES)
    except (OSError, ValueError, RecursionError):
        return None
    if not is_object(document) or document.get("key") != key:
        return None
    try:
        return Outcome.from_json(document.get("outcome"), str(path))
    except InputError:
        return None


def write_outcome(folder: Path, key: str, cell: Cell, outcome: Outcome) -> None:
    """Keep the outcome of a cell. Raises InputError when it cannot be written."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "key": key,
        "label": cell.label,
        "outcome": outcome.as_json(),
    }
    write_whole(cell_path(folder, key), json.dumps(document, indent=1) + "\n")


def cell_path(folder: Path, key: str) -> Path:
    """Where the outcome of the cell `key` is kept."""
    return folder / "cells" / f"{key}.json"


@contextmanager
def sole_sweep_in(folder: Path) -> Generator[None]:
    """Make the folder, and keep other sweeps out of it until the end of the block (or of the process).

    Raises InputError when it cannot be made, holds a run, or another sweep is at work in it.
    """
    if taken := [name for name in FILES if os.path.lexists(folder / name)]:
        raise InputError(
            f"--out {folder}: it holds a {taken[0]}, of a run. Give another folder, or remove it."
        )
    make_folder(folder / "cells")
    with FolderLock(folder, f"--out {folder}"):
        yield


def _digest(document: Any) -> str:
    text = json.dumps(document, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _content_digest(model: str) -> str | None:
    """A digest of the model's config; None if it is not on this machine."""
    path = config_here(model)
    try:
        return path and hashlib.sha256(read_whole(path, MAX_CONFIG_BYTES)).hexdigest()
    except OSError:
        return None


@cache
def _code_digest() -> str:
    """A digest of every module of harness: answers of different code do not belong in one table."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def _machine(device: str | None) -> dict[str, Any]:
    """What a measurement on this machine depends on, found without initializing a GPU."""
    return {
        "device": device,
        "gpus": device_names(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cpu": f"{platform.system()} {platform.machine()} {platform.processor()} {os.cpu_count()}",
    }
