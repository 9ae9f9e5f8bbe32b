"""Where formulas are kept between questions: one file each, in the user's cache."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from harness.architecture import find_config
from harness.errors import InputError
from harness.formula.formula import Formula
from harness.hardware import Hardware
from harness.recipe import Recipe
from harness.system import PACKAGE, PACKAGES, installed_version, write_whole

SIZES = ("micro_batch_size", "seq_len")
WITHOUT_INFLUENCE = ("data", "learning_rate", "seed")
"""Fields that no request depends on."""
DECIDING = ("formula", "observe", "parallel", "recipe", "simulate", "training")
"""Packages of harness that decide what is requested."""
ENVIRONMENT = ("CUBLAS_WORKSPACE_CONFIG", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_DISABLE_NATIVE_JIT")


def key_of(recipe: Recipe, hardware: Hardware, rank: int = 0) -> dict[str, Any]:
    """What a formula of this recipe holds for: everything but its sizes that a request may depend on.

    Of the hardware: compute capability, multiprocessors and what cuBLAS was seen to keep; not its memory.
    Raises InputError where the model's config cannot be found.
    """
    fields = recipe.model_dump(mode="json")
    for name in (*SIZES, *WITHOUT_INFLUENCE):
        del fields[name]
    return {
        "recipe": fields,
        "config": hashlib.sha256(find_config(recipe.model).read_bytes()).hexdigest(),
        "rank": rank,
        "gpu": [
            hardware.datasheet.compute_capability,
            hardware.sm_count,
            hardware.calibration.cublas_workspace_bytes,
        ],
        "versions": {name: installed_version(name) for name in PACKAGES},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
        "code": _code(),
    }


@cache
def _code() -> str:
    """A digest of what decides about requests here."""
    digest = hashlib.sha256()
    for package in DECIDING:
        for file in sorted((PACKAGE / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def folder() -> Path:
    """HARNESS_CACHE, or harness in the user's cache."""
    given = os.environ.get("HARNESS_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "harness"


def load(recipe: Recipe, hardware: Hardware, rank: int = 0) -> Formula:
    """The formula that is kept for this recipe, or an empty one."""
    try:
        key = key_of(recipe, hardware, rank)
    except InputError:  # the simulation will say what is wrong with the model
        return Formula({})
    try:
        formula = Formula.from_json(json.loads(gzip.decompress(_path(key).read_bytes())))
    except (OSError, EOFError, ValueError, KeyError, TypeError, IndexError):
        return Formula(key)  # none, or nothing that can be read: it is made again
    return formula if formula.key == json.loads(json.dumps(key)) else Formula(key)


def save(formula: Formula) -> None:
    """Keep what is new for the next question; without a folder that can be written to, it is not kept."""
    if not formula.key or not formula.changed:
        return
    formula.changed = False
    path = _path(formula.key)
    document = json.dumps(formula.as_json(), separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, gzip.compress(document.encode(), 6, mtime=0))
    except (OSError, InputError):
        return


def _path(key: dict[str, Any]) -> Path:
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return folder() / "formulas" / f"{name}.json.gz"
